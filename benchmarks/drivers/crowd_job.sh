#!/bin/bash
# A job that works, saves when it is asked, and goes on from what it saved: in bash alone, so that
# two cores can bear hundreds of them. Its work is GPU seconds; it hears of a notice through a
# FIFO from crowd_crew.py, which plays its esrun, and answers through the crew's.
#   WORK: GPU seconds; CROWD: a directory of its user's
home=$CROWD/$SLURM_JOB_NAME
mkdir -p "$home"
[ -p "$home/in" ] || mkfifo "$home/in"
exec 8<>"$home/in"
run=${SLURM_RESTART_COUNT:-0}
nodes=${SLURM_JOB_NUM_NODES:-1}
gpus=$((${SLURM_GPUS_ON_NODE:-1} * nodes))
step=0
[ ! -e "$home/saved" ] || step=$(<"$home/saved")
note() { echo "$1 $SLURM_JOB_ID $run $2 $EPOCHREALTIME" >>"$home/log"; }
# Without a crew nobody reads: a full FIFO would stop us.
tell() { [ ! -e "$CROWD/crew" ] || echo "$*" >>"$CROWD/out"; }
note begin "$step"
tell begin "$SLURM_JOB_ID" "$run" "$SLURM_JOB_NAME" "$gpus" "$nodes" "$step" "$WORK"
while [ "$step" -lt "$WORK" ]; do
    if ! read -r -t 1 -u 8 word notice; then
        step=$((step + gpus))
    elif [ "$word" = save ]; then
        echo "$step" >"$home/saved.new" && mv "$home/saved.new" "$home/saved"
        note saved "$step"
        tell saved "$SLURM_JOB_ID" "$run" "$notice" "$step"
        until [ "$word" = resume ]; do read -r -u 8 word notice; done
        note resumed "$step"
    fi
done
note end "$step"
tell end "$SLURM_JOB_ID" "$run"
