# bash completion for selastic; install as /usr/share/bash-completion/completions/selastic
# Written by `make generate`.

_selastic_jobs() {
    # One question to slurmctld per TAB, about the caller's own jobs.
    timeout 2 squeue --me --noheader --format=%i 2>/dev/null
}

_selastic() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local i verb='' options='' arguments=''
    COMPREPLY=()

    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
            --config | --controller) ((i++)) ;;
            -*) ;;
            *) verb=${COMP_WORDS[i]}; break ;;
        esac
    done
    case $verb in
        workload) if ((i + 1 < COMP_CWORD)); then verb+=" ${COMP_WORDS[i+1]}"; fi ;;
    esac
    case "$verb $previous" in
        ' --config' | 'plan --export' | 'topology --plot' | 'install --prefix' | 'install --root' | 'uninstall --prefix' | 'uninstall --root' | 'simulate --profiles' | 'simulate --restarts' | 'simulate --gradient-bytes' | 'simulate --neighbours' | 'simulate --gpu-pairs' | 'simulate --config' | 'simulate --jobs-csv' | 'simulate --plot' | 'simulate --slowdown' | 'compare --profiles' | 'compare --restarts' | 'compare --gradient-bytes' | 'compare --neighbours' | 'compare --gpu-pairs' | 'compare --config' | 'compare --jobs-csv' | 'compare --plot' | 'compare --sacct' | 'workload generate --profiles' | 'workload generate -o' | 'workload generate --output' | 'workload from-sacct --scaling' | 'workload from-sacct -o' | 'workload from-sacct --output' | 'profile --data' | 'profile --dir' | 'profile --out' | 'profile --plot' | 'recommend --profile' | 'recommend --plot')
            compopt -o default
            return ;;
        ' --controller' | 'status -o' | 'status --format' | 'history -o' | 'history --format' | 'usage -S' | 'usage --start' | 'usage -E' | 'usage --end' | 'usage -o' | 'usage --format' | 'topology -o' | 'topology --format' | 'update --elastic' | 'update --layout' | 'simulate --cluster' | 'simulate --interval' | 'simulate --seed' | 'simulate --speeds' | 'simulate --racks' | 'simulate --uplink-gbit' | 'simulate --congestion' | 'simulate --jobs' | 'simulate --policy' | 'simulate --timers' | 'simulate --lease' | 'simulate --slots' | 'compare --cluster' | 'compare --interval' | 'compare --seed' | 'compare --speeds' | 'compare --racks' | 'compare --uplink-gbit' | 'compare --congestion' | 'compare --jobs' | 'compare --policies' | 'compare --scaling' | 'compare --grow' | 'compare -S' | 'compare --start' | 'compare -E' | 'compare --end' | 'compare --partition' | 'workload generate --jobs' | 'workload generate --hours' | 'workload generate --mix' | 'workload generate --sizes' | 'workload generate --classes' | 'workload generate --seed' | 'workload from-sacct --grow' | 'workload from-sacct --speeds' | 'workload from-sacct -S' | 'workload from-sacct --start' | 'workload from-sacct -E' | 'workload from-sacct --end' | 'workload from-sacct --partition' | 'partition --machines' | 'partition --bandwidth' | 'partition --memory' | 'partition --batch' | 'partition --states' | 'partition -o' | 'partition --format' | 'profile --shapes' | 'profile --batch' | 'profile --repeats' | 'profile --steps' | 'profile --warm-up' | 'profile --timeout' | 'profile --application' | 'profile --gpu-type' | 'profile --send' | 'profile -p' | 'profile --partition' | 'profile --nodes' | 'profile --gpus-per-node' | 'profile --time' | 'profile -o' | 'profile --format' | 'recommend --epochs' | 'recommend --samples' | 'recommend --deadline' | 'recommend --budget' | 'recommend --price' | 'recommend --model' | 'recommend --batch' | 'recommend --global-batch' | 'recommend -o' | 'recommend --format' | 'durations -S' | 'durations --start' | 'durations -E' | 'durations --end' | 'durations --partition' | 'durations -o' | 'durations --format' | 'report -S' | 'report --start' | 'report -E' | 'report --end' | 'report --partition' | 'report -o' | 'report --format')
            :
            return ;;
        'usage -u' | 'usage --user' | 'report -u' | 'report --user')
            mapfile -t COMPREPLY < <(compgen -u -- "$current")
            return ;;
        'install --node')
            mapfile -t COMPREPLY < <(compgen -W 'controller login compute' -- "$current")
            return ;;
        'simulate --clock' | 'compare --clock')
            mapfile -t COMPREPLY < <(compgen -W 'round event' -- "$current")
            return ;;
        'simulate --class' | 'compare --class')
            mapfile -t COMPREPLY < <(compgen -W 'adaptive strong-scaling rigid' -- "$current")
            return ;;
        'simulate --in-place' | 'compare --in-place')
            mapfile -t COMPREPLY < <(compgen -W 'auto never' -- "$current")
            return ;;
        'simulate --freezing' | 'compare --freezing')
            mapfile -t COMPREPLY < <(compgen -W 'pessimistic central optimistic' -- "$current")
            return ;;
        'simulate --format')
            mapfile -t COMPREPLY < <(compgen -W 'jobs dally' -- "$current")
            return ;;
        'workload generate --arrivals')
            mapfile -t COMPREPLY < <(compgen -W 'poisson diurnal bursts' -- "$current")
            return ;;
    esac
    case $verb in
        '') options='--config --controller --version --help'
            arguments='status show explain plan history usage topology hold release update retire reconfigure check config ping install uninstall simulate compare workload partition profile recommend durations report' ;;
        'status') options='--all --watch --format --noheader --parsable --json --help'
            arguments='' ;;
        'show') options='--profile --json --help'
            arguments='job @jobs' ;;
        'explain') options='--json --help'
            arguments='@jobs' ;;
        'plan') options='--all --export --json --help'
            arguments='' ;;
        'history') options='--format --noheader --parsable --json --help'
            arguments='@jobs' ;;
        'usage') options='--user --start --end --by-user --check --format --noheader --parsable --json --help'
            arguments='' ;;
        'topology') options='--all --plot --format --noheader --parsable --json --help'
            arguments='' ;;
        'hold') options='--dry-run --json --help'
            arguments='@jobs' ;;
        'release') options='--dry-run --json --help'
            arguments='@jobs' ;;
        'update') options='--elastic --layout --dry-run --json --help'
            arguments='@jobs' ;;
        'retire') options='--yes --dry-run --json --help'
            arguments='' ;;
        'reconfigure') options='--dry-run --json --help'
            arguments='' ;;
        'check') options='--json --help'
            arguments='' ;;
        'config') options='--help'
            arguments='' ;;
        'ping') options='--json --help'
            arguments='' ;;
        'install') options='--prefix --root --node --no-commands --dry-run --help'
            arguments='' ;;
        'uninstall') options='--prefix --root --dry-run --help'
            arguments='' ;;
        'simulate') options='--profiles --cluster --interval --clock --seed --class --restarts --in-place --speeds --racks --uplink-gbit --congestion --gradient-bytes --neighbours --gpu-pairs --freezing --config --artifact-compat --jobs --jobs-csv --plot --policy --format --slowdown --timers --lease --slots --json --help'
            arguments='@files' ;;
        'compare') options='--profiles --cluster --interval --clock --seed --class --restarts --in-place --speeds --racks --uplink-gbit --congestion --gradient-bytes --neighbours --gpu-pairs --freezing --config --artifact-compat --jobs --jobs-csv --plot --policies --sacct --scaling --grow --sleep --start --end --partition --completed-only --json --help'
            arguments='@files' ;;
        'workload generate') options='--jobs --hours --arrivals --mix --sizes --classes --seed --profiles --output --help'
            arguments='' ;;
        'workload from-sacct') options='--scaling --grow --speeds --start --end --partition --completed-only --output --help'
            arguments='@files' ;;
        'workload profiles') options='--help'
            arguments='@files' ;;
        'partition') options='--machines --bandwidth --activations --memory --batch --plans --straight --paper --free-sources --states --format --noheader --parsable --json --help'
            arguments='@files' ;;
        'profile') options='--shapes --data --batch --repeats --steps --warm-up --whole --timeout --dir --again --out --plot --application --gpu-type --send --partition --nodes --gpus-per-node --time --format --noheader --parsable --json --dry-run --help'
            arguments='@files' ;;
        'recommend') options='--profile --epochs --samples --deadline --budget --price --model --extrapolate --batch --global-batch --uncached --once --plot --format --noheader --parsable --json --help'
            arguments='@files' ;;
        'durations') options='--start --end --partition --completed-only --format --noheader --parsable --json --help'
            arguments='@files' ;;
        'report') options='--user --start --end --partition --completed-only --format --noheader --parsable --json --help'
            arguments='@files' ;;
        workload) options='--help'
            arguments='generate from-sacct profiles' ;;
    esac
    [[ $current == -* ]] && arguments=$options
    case " $arguments " in
        *' @jobs '*) arguments="${arguments/@jobs/} $(_selastic_jobs)" ;;
        *' @files '*) compopt -o default; return ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$arguments" -- "$current")
}
complete -F _selastic selastic
