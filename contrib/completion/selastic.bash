# bash completion for selastic; install as /usr/share/bash-completion/completions/selastic

_selastic_jobs() {
    # One question to slurmctld per TAB, about the caller's own jobs.
    timeout 2 squeue --me --noheader --format=%i 2>/dev/null
}

_selastic() {
    local current=${COMP_WORDS[COMP_CWORD]} previous=${COMP_WORDS[COMP_CWORD-1]}
    local verbs='status show explain plan history usage topology hold release update retire
        reconfigure check config ping simulate compare workload partition profile recommend'
    local global='--config --controller --version --help'
    local table='--format --noheader --parsable --json'
    local simulation='--profiles --cluster --interval --clock --seed --class --restarts --speeds
        --freezing --racks --uplink-gbit --congestion --gradient-bytes --config --artifact-compat
        --jobs --jobs-csv --plot --json --help'
    local i verb='' words='' sub=''
    COMPREPLY=()

    case $previous in
        --config | --profile | --profiles | --restarts | --slowdown | --gradient-bytes | --jobs-csv | --plot | --sacct | --output | --data | --dir | --out | -o)
            compopt -o default; return ;;
        --clock) mapfile -t COMPREPLY < <(compgen -W 'round event' -- "$current"); return ;;
        --class)
            mapfile -t COMPREPLY < <(compgen -W 'adaptive strong-scaling rigid' -- "$current")
            return ;;
        --arrivals)
            mapfile -t COMPREPLY < <(compgen -W 'poisson diurnal bursts' -- "$current"); return ;;
        --controller) return ;;
        --user | -u) mapfile -t COMPREPLY < <(compgen -u -- "$current"); return ;;
    esac
    for ((i = 1; i < COMP_CWORD; i++)); do
        case ${COMP_WORDS[i]} in
            --config | --controller) ((i++)) ;;
            -*) ;;
            *) verb=${COMP_WORDS[i]}; sub=${COMP_WORDS[i+1]-}; break ;;
        esac
    done
    ((i + 1 < COMP_CWORD)) || sub=''

    case $verb in
        '') words="$verbs $global" ;;
        status) words="--all --watch $table --help" ;;
        show) words="--profile --json --help" ;;
        explain) words="--json --help" ;;
        plan) words="--all --json --help" ;;
        history) words="$table --help" ;;
        usage) words="--user --start --end --by-user --check $table --help" ;;
        topology) words="--all --plot $table --help" ;;
        hold | release) words="--dry-run --json --help" ;;
        update) words="--elastic= --layout= --dry-run --json --help" ;;
        retire) words="--yes --dry-run --json --help" ;;
        reconfigure) words="--dry-run --json --help" ;;
        check | ping) words="--json --help" ;;
        config) words="--help" ;;
        simulate) words="--policy --format --slowdown --timers --lease --slots $simulation" ;;
        compare) words="--policies --sacct --scaling --grow --completed-only $simulation" ;;
        partition) words="--machines --bandwidth --activations --memory --straight --paper
            --free-sources --states $table --help" ;;
        profile) words="--shapes --data --batch --repeats --steps --warm-up --whole --timeout --dir
            --again --out --plot --application --gpu-type --send --partition --nodes --gpus-per-node
            --time --dry-run $table --help" ;;
        recommend) words="--profile --epochs --samples --deadline --budget --price --model
            --extrapolate --batch --global-batch --uncached --once --plot $table --help" ;;
        workload)
            case $sub:$current in
                generate:*) words='--jobs --hours --arrivals --mix --sizes --classes --seed
                    --profiles --output --help' ;;
                from-sacct:*) words='--scaling --grow --speeds --completed-only --output --help' ;;
                profiles:* | :-*) words='--help' ;;
                :*) words='generate from-sacct profiles' ;;
            esac ;;
    esac
    case $verb:$sub:$current in
        simulate:*:-* | compare:*:-* | partition:*:-* | profile:*:-* | recommend:*:-* | workload:[a-z]*:-*) ;;
        simulate:* | compare:* | partition:* | profile:* | recommend:* | workload:[a-z]*) compopt -o default ;;
    esac
    case $verb:$current in
        :* | *:-*) ;;
        explain:* | history:* | hold:* | release:* | update:*) words=$(_selastic_jobs) ;;
        show:*) words="job $(_selastic_jobs)" ;;
    esac
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
    [[ ${COMPREPLY[0]-} == --elastic= ]] && compopt -o nospace
}
complete -F _selastic selastic
