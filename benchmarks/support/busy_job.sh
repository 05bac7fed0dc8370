#!/bin/bash
# Job that works, saves on a notice, and continues from its save: in bash alone, so that two cores can
# run hundreds of them. A notice comes through a FIFO from job_reporter.py, the stand-in for its
# esrun; the answer goes through that of the reporter.
#   WORK: GPU seconds; JOBS_DIR: folder of its user
home=$JOBS_DIR/$SLURM_JOB_NAME
mkdir -p "$home"
[ -p "$home/in" ] || mkfifo "$home/in"
exec 8<>"$home/in"
run=${SLURM_RESTART_COUNT:-0}
nodes=${SLURM_JOB_NUM_NODES:-1}
gpus=$((${SLURM_GPUS_ON_NODE:-1} * nodes))
step=0
[ ! -e "$home/saved" ] || step=$(<"$home/saved")
note() { echo "$1 $SLURM_JOB_ID $run $2 $EPOCHREALTIME" >>"$home/log"; }
# Without a reporter there is no reader: a full FIFO would stop the job.
tell() { [ ! -e "$JOBS_DIR/reporter" ] || echo "$*" >>"$JOBS_DIR/out"; }
note begin "$step"
tell begin "$SLURM_JOB_ID" "$run" "$SLURM_JOB_NAME" "$gpus" "$nodes" "$step" "$WORK"
line=
while [ "$step" -lt "$WORK" ]; do
    # The second may be over in the middle of a line, which is then read in two parts.
    if ! IFS= read -r -t 1 -u 8 part; then
        line+=$part
        step=$((step + gpus))
        continue
    fi
    read -r word notice <<<"$line$part"
    line=
    if [ "$word" = save ]; then
        echo "$step" >"$home/saved.new" && mv "$home/saved.new" "$home/saved"
        note saved "$step"
        tell saved "$SLURM_JOB_ID" "$run" "$notice" "$step"
        until [ "$word" = resume ]; do read -r -u 8 word notice; done
        note resumed "$step"
    fi
done
note end "$step"
tell end "$SLURM_JOB_ID" "$run"
