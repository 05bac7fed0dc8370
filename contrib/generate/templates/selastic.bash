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
            @global-values
            -*) ;;
            *) verb=${COMP_WORDS[i]}; break ;;
        esac
    done
    case $verb in
        @groups
    esac
    case "$verb $previous" in
        @values
    esac
    case $verb in
        @words
    esac
    [[ $current == -* ]] && arguments=$options
    case " $arguments " in
        *' @jobs '*) arguments="${arguments/@jobs/} $(_selastic_jobs)" ;;
        *' @files '*) compopt -o default; return ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$arguments" -- "$current")
}
complete -F _selastic selastic
