#!/bin/bash
# Several nodes of eight GPUs under Slurm:
#   sbatch --nodes 2 launch/slurm.sh --recipe 2b
# Everything after the script's name goes to `sparsellm train`. Two minutes before the time limit
# the run saves a checkpoint and leaves; the job is then queued again and resumes.
# The run folder must be on a file system that all nodes share.
#SBATCH --job-name=sparsellm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@120

set -u
for argument in "$@"; do
  case $argument in
    --fresh | --resume | --resume=*)
      echo "$0: a job that is queued again would start over or go back by $argument; instead give" \
        "--set name=NEW, or write the checkpoint's name into checkpoints/latest" >&2
      exit 2
      ;;
  esac
done
gpus_per_node=8
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)

# `accelerate launch` would die of SIGUSR1, so the signal goes to the trainers alone: they are the
# processes that it started as `python -u -m sparsellm …`. (The brackets: a pattern that does not
# match its own command line.)
save_and_requeue() {
  srun --overlap --ntasks-per-node=1 pkill -USR1 -f -- '[-]u -m sparsellm'
  wait "$launcher"
  scontrol requeue "$SLURM_JOB_ID"
}
trap save_and_requeue USR1

srun --kill-on-bad-exit=1 bash -c "accelerate launch \
  --multi_gpu --num_machines $SLURM_NNODES --machine_rank \$SLURM_NODEID \
  --num_processes $((SLURM_NNODES * gpus_per_node)) --rdzv_backend static \
  --main_process_ip $head_node --main_process_port 29500 --mixed_precision no \
  -m sparsellm train ${*@Q}" &
launcher=$!
wait "$launcher"
