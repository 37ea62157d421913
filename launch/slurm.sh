#!/bin/bash
# Nodes of eight GPUs under Slurm, by any config of this folder (CONFIG, default ddp8):
#   sbatch --nodes 2 launch/slurm.sh --recipe 2b
#   sbatch --nodes 4 --export=ALL,CONFIG=hsdp launch/slurm.sh --recipe 8b
# Everything after the script's name goes to `sparsellm train`. The run folder must be on a file
# system that all nodes share.
# - Each node has one launcher (torchrun's, through accelerate); they meet at the first node (c10d
#   rendezvous). Where a rank fails or its node is lost and comes back, all launchers start their
#   ranks again, up to MAX_RESTARTS times (default 3), and the run resumes from its last checkpoint.
# - Where Slurm itself takes a node away, it queues the job again (--requeue). So does this script
#   two minutes before the time limit, and on preemption: the run saves a checkpoint first.
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
# Else the launcher of a node that came back waits for an address that the others do not repeat
# (torch 2.11 to 2.13: they keep the key-value store of their first meeting).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
gpus_per_node=${GPUS_PER_NODE:-8}
# Slurm runs a copy of this file from its spool folder; the configs lie where the job was submitted.
config=${CONFIG:-ddp8}
[ -f "$config" ] || config=${SLURM_SUBMIT_DIR:-.}/launch/$config.yaml
if [ ! -f "$config" ]; then
  echo "$0: no such file: $config; submit from the repository, or give CONFIG the path of a file" >&2
  exit 2
fi
head_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
options=(
  --config_file "$config"
  --num_machines "$SLURM_NNODES" --num_processes $((SLURM_NNODES * gpus_per_node))
  --rdzv_backend c10d --main_process_ip "$head_node" --main_process_port "${PORT:-29500}"
  --rdzv_conf "join_timeout=${JOIN_TIMEOUT:-1800}"
  --max_restarts "${MAX_RESTARTS:-3}"
)
if grep -q '^parallelism_config:' "$config"; then # shards within a node, replicas across nodes
  options+=(--parallelism_config_dp_replicate_size "$SLURM_NNODES")
  options+=(--parallelism_config_dp_shard_size "$gpus_per_node")
fi

# A launcher would die of SIGUSR1, so the signal goes to the trainers alone: they are the processes
# that it started as `python -u -m sparsellm …`. (The brackets: a pattern that does not match its own
# command line.)
save_and_requeue() {
  srun --overlap --ntasks-per-node=1 pkill -USR1 -f -- '[-]u -m sparsellm'
  wait "$launcher"
  scontrol requeue "$SLURM_JOB_ID"
}
trap save_and_requeue USR1 TERM

# srun must not end the other launchers where one fails: they wait for it to come back. Where all
# restarts are used up, each of them ends by itself.
srun --kill-on-bad-exit=0 bash -c "exec accelerate launch ${options[*]@Q} \
  --machine_rank \$SLURM_NODEID -m sparsellm train ${*@Q}" &
launcher=$!
wait "$launcher"
