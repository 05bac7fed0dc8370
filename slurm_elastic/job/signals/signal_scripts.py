"""Shell scripts that signal the ranks of a step on one node.

A signal goes to the processes that train: to the tasks of the step, or, where a task is a shell, a
launcher or another command that only runs a program, to the processes below it. Data-loader
workers, and other processes that ranks start, get none: it would end them.
"""

from slurm_elastic.job.slurm_env import STEP_VARIABLE

#: Seconds after which guards let frozen ranks go on by themselves: esrun, which does so after
#: two minutes (`script_watch`), no longer runs.
_GUARD_FROZEN_S = 150

#: Sends signal $1 to the ranks of step $2; fails if there are none. KILL, STOP and THAW, which is
#: CONT, go to all processes, whose ids are then in `all`; not STOP to srun itself, which has the
#: mark too.
#:
#: - A task's parent is slurmstepd, process $3 (without Slurm), or (hidepid) is not visible.
#: - Shells, and processes without RANK in the environment of a launcher, are passed by. They get
#:   the signal themselves if they handle it, and TERM if they have nothing below.
#: - Below them, only processes that handle the signal get it, except TERM. Filters of a pipe end
#:   with their input: without them a rank could not write to its output while it saves.
#: - THAW also gives back the files that a process may open, where GUARD_SCRIPT has taken them.
_SIGNAL_TASKS = rf"""
status() {{
    parent= caught=0
    while read -r key value; do
        case $key in PPid:) parent=$value;; SigCgt:) caught=$value;; esac
    done 2>/dev/null </proc/$1/status
}}
handles() {{
    case $2 in HUP) bit=0;; INT) bit=1;; USR1) bit=9;; USR2) bit=11;;
        TERM) bit=14;; CONT) bit=17;; WINCH) bit=27;; *) return 1;;
    esac
    status "$1"
    [ $((0x${{caught#????????}} >> bit & 1)) = 1 ]
}}
is_wrapper() {{
    program=$(readlink /proc/$1/exe 2>/dev/null) program=${{program##*/}}
    case $program in
        sh|bash|dash|*ksh*|zsh*|*csh|fish|busybox) return 0;;
        timeout|time|conda|mamba|micromamba|pixi|uv) return 0;;
        apptainer|singularity|starter*|tini|dumb-init|nsys*) return 0;;
    esac
    case " $(tr '\0' ' ' 2>/dev/null </proc/$1/cmdline) " in
        *[/\ ]torchrun\ *|*\ torch.distributed.run\ *|*\ torch.distributed.launch\ *) return 0;;
        *[/\ ]accelerate\ launch\ *|*[/\ ]accelerate-launch\ *) return 0;;
        *\ accelerate.commands.launch\ *|*[/\ ]conda\ run\ *) return 0;;
    esac
    ! grep -qsz '^RANK=' /proc/$1/environ
}}
is_helper() {{
    program=$(readlink /proc/$1/exe 2>/dev/null)
    case ${{program##*/}} in
        tee|cat|grep|sed|awk|mawk|gawk|tr|ts|head|tail|sort|logger|sleep|nvidia-smi) return 0;;
    esac
    grep -qs multiprocessing.resource_tracker /proc/$1/cmdline
}}
signal_program() {{
    if ! is_wrapper "$2"; then
        [ "$3" = task ] || [ "$1" = TERM ] || handles "$2" "$1" || return 1
        kill -s "$1" "$2" 2>/dev/null
        return
    fi
    sent=1
    if handles "$2" "$1"; then
        kill -s "$1" "$2" 2>/dev/null && sent=0
        case $program:$1 in *sh:TERM|busybox:TERM) ;; *) return $sent;; esac
    fi
    for entry in $tree; do
        case $entry in *:$2)
            is_helper "${{entry%:*}}" && continue
            # In a subshell: the names below are not local.
            (signal_program "$1" "${{entry%:*}}" below) && sent=0
        esac
    done
    [ "$sent" = 0 ] && return
    [ "$1" = TERM ] && kill -s "$1" "$2" 2>/dev/null
}}
open_files() {{
    soft= hard=
    while read -r first second third value most _; do
        case "$first $second $third" in "Max open files") soft=$value hard=$most; return;; esac
    done 2>/dev/null </proc/$1/limits
}}
allow_files() {{
    open_files "$1"
    [ "$soft" = 0 ] || return 0
    for value in "$(ulimit -Sn)" "$hard"; do
        prlimit --pid "$1" --nofile="$value:" 2>/dev/null && return
    done
}}
signal_tasks() {{
    found=1 tree= tasks= all=
    for file in $(grep -lzFx "{STEP_VARIABLE}=$2" /proc/[0-9]*/environ 2>/dev/null); do
        pid=${{file%/environ}} pid=${{pid#/proc/}}
        case $1 in KILL|STOP|THAW)
            read -r name 2>/dev/null </proc/$pid/comm || name=
            case $1:$name in STOP:srun|KILL:srun) continue;; esac
            name=$1
            [ "$1" = THAW ] && name=CONT && allow_files "$pid"
            kill -s "$name" "$pid" 2>/dev/null && found=0 all="$all $pid"
            continue
        esac
        status "$pid"
        tree="$tree $pid:$parent"
        read -r name 2>/dev/null </proc/$parent/comm || name=slurmstepd
        case $name:$parent in slurmstepd*|*:"${{3:-none}}") tasks="$tasks $pid";; esac
    done
    for pid in $tasks; do signal_program "$1" "$pid" task && found=0; done
    return $found
}}
"""
# Slurm repeats its SIGTERM, and sends it to helper steps too.
SIGNAL_SCRIPT = "trap '' TERM" + _SIGNAL_TASKS + 'signal_tasks "$@"'

#: Prints `ready`. The first USR2 freezes the ranks; it prints `frozen` then. After the second it
#: kills them at Slurm's SIGTERM, which they may ignore. USR1 lets them go on and ends it. Slurm
#: sends SIGCONT before SIGTERM: frozen ranks are stopped again at once, so that they do not begin a
#: save that the SIGTERM would cut. Until they are, they cannot open a file, and so not cut off a
#: checkpoint that they overwrite: from the second USR2 on their limit of open files is 0 (where
#: prlimit of util-linux is installed).
#:
#: A shell runs a trap between any two commands, also between those of a function or of another
#: trap. Traps therefore only note the signal, and what has begun is finished first; SIGCONT, which
#: cannot wait, changes no variable. Signals reach the commands of this script too: grep and prlimit
#: may end before they are through. A pause is short: one that misses the signal delays the end of
#: the step. In bash it reads from a pipe to which nothing is written: of two signals that come at
#: once, as Slurm's SIGCONT and SIGTERM may, its `wait` loses one.
GUARD_SCRIPT = (
    _SIGNAL_TASKS
    + f"""
armed=
notices=0 handled=0 end= frozen= waited=0 limited=
freeze() {{
    # Twice: a process may have started another one meanwhile.
    signal_tasks STOP "$1"; frozen=$all
    signal_tasks STOP "$1"; frozen="$frozen $all"
    waited=0
    echo frozen
}}
limit_files() {{
    for pid in $frozen; do
        open_files "$pid"
        case $soft in ''|0) continue;; esac
        limited="$limited $pid:$soft"
        prlimit --pid "$pid" --nofile=0: 2>/dev/null
    done
}}
thaw() {{
    frozen=
    for entry in $limited; do
        prlimit --pid "${{entry%:*}}" --nofile="${{entry#*:}}:" 2>/dev/null
    done
    limited=
    [ "$handled" = 0 ] || signal_tasks THAW "$1"
}}
if [ -n "$BASH_VERSION" ]; then
    set +o posix  # before 5.1 it excludes this redirection
    eval 'exec 3<> <(:)'
    set -o posix  # `read` returns after a trap
fi
pause() {{
    if [ -n "$BASH_VERSION" ]; then
        read -r -t 1 _ <&3
        [ $? -gt 128 ] && return
    fi
    sleep 1 >/dev/null & wait
}}
trap 'notices=$((notices+1))' USR2
trap '[ -z "$frozen" ] || kill -s STOP $frozen 2>/dev/null' CONT
trap 'end=${{end:-USR1}}' USR1
trap 'end=${{end:-TERM}}' TERM
echo ready
while :; do
    if [ "$notices" -gt "$handled" ]; then
        handled=$((handled+1))
        if [ "$handled" = 1 ]; then freeze "$2"; else armed=1; limit_files; fi
        continue
    fi
    [ -z "$end" ] || break
    pause
    [ -z "$frozen" ] && continue
    waited=$((waited+1))
    [ "$waited" -lt {_GUARD_FROZEN_S} ] || {{ thaw "$2"; armed=; }}
done
trap '' TERM CONT USR1
if [ "$end$armed" = TERM1 ]; then
    [ -z "$frozen" ] || kill -s KILL $frozen 2>/dev/null
    signal_tasks KILL "$2"
else
    thaw "$2"
fi
exit 0
"""
)
