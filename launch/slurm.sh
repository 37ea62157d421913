#!/bin/bash
# Nodes of eight GPUs under Slurm, with any configuration of this folder (CONFIG, default ddp8):
#   sbatch --nodes 2 launch/slurm.sh --recipe 2b
#   sbatch --nodes 4 --export=ALL,CONFIG=hsdp launch/slurm.sh --recipe 8b
# Everything after the script's name goes to `sparsellm train`. The run folder must be on a file
# system that all nodes share.
# - Each node has one launcher (torchrun's, through accelerate); they meet at the first node (c10d
#   rendezvous). If a rank fails, or its node is lost and comes back, all launchers restart their
#   ranks, up to MAX_RESTARTS times (default 3), and the run resumes from its last checkpoint.
# - If Slurm takes a node away, it requeues the job (--requeue). This script does the same two
#   minutes before the time limit and on preemption, after the run has saved a checkpoint.
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
      echo "$0: a requeued job would start over or go back by $argument; instead give" \
        "--set name=NEW, or write the checkpoint's name into checkpoints/latest" >&2
      exit 2
      ;;
  esac
done
# Without this, the launcher of a node that comes back waits for an address that the others do not
# announce again (torch 2.11 to 2.13 keep the key-value store of the first rendezvous).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
gpus_per_node=${GPUS_PER_NODE:-8}
# Slurm runs a copy of this file from its spool folder; the configurations are in the folder that the
# job was submitted from.
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

# SIGUSR1 would kill a launcher, so the signal goes to the training processes only, which it started
# as `python -u -m sparsellm …`. (The brackets keep the pattern from matching its own command line.)
save_and_requeue() {
  srun --overlap --ntasks-per-node=1 pkill -USR1 -f -- '[-]u -m sparsellm'
  wait "$launcher"
  scontrol requeue "$SLURM_JOB_ID"
  exit # by whether it is queued again, not by the signal
}
trap save_and_requeue USR1 TERM

# If one launcher fails, srun must not end the others: they wait for it to come back. When all
# restarts are used up, each of them ends by itself.
srun --kill-on-bad-exit=0 bash -c "exec accelerate launch ${options[*]@Q} \
  --machine_rank \$SLURM_NODEID -m sparsellm train ${*@Q}" &
launcher=$!
wait "$launcher"
