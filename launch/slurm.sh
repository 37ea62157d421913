#!/bin/bash
# Trains on nodes of eight GPUs under Slurm, with any configuration of this folder (CONFIG, default ddp8):
#   sbatch --nodes 2 launch/slurm.sh --recipe 2b
#   sbatch --nodes 4 --export=ALL,CONFIG=hsdp launch/slurm.sh --recipe 8b
# Everything after the script's name goes to `sparsellm train`. The run folder must be on a file
# system that all nodes share.
# - Each node has one launcher (torchrun's, through accelerate). If a rank or a launcher fails, all
#   of them end, and this script starts them again in the same allocation, up to MAX_RESTARTS times
#   (default 3). The run resumes from its last checkpoint.
# - If Slurm takes a node away or preempts the job, it requeues the job (--requeue). On preemption,
#   and five minutes before the time limit, the run saves a checkpoint before that. If the save takes
#   longer than Slurm waits, the run resumes from the checkpoint before.
#SBATCH --job-name=sparsellm
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=96
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=B:USR1@300

set -u
for argument in "$@"; do
  case $argument in
    --fresh)
      echo "$0: a requeued job would start over again by $argument; instead give --set name=NEW" >&2
      exit 2
      ;;
  esac
done
# Without this srun would give a task one core: from Slurm 22.05 on it ignores sbatch's --cpus-per-task.
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# Some configurations of Slurm signal the launchers too, which would then kill their ranks after 30 s.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=1800
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
  --rdzv_backend static --main_process_ip "$head_node" --main_process_port "${PORT:-29500}"
)
if grep -q '^parallelism_config:' "$config"; then # shards within a node, replicas across nodes
  options+=(--parallelism_config_dp_replicate_size "$SLURM_NNODES")
  options+=(--parallelism_config_dp_shard_size "$gpus_per_node")
fi

# What runs on each node. Only this shell receives Slurm's SIGTERM (`set -m` gives the launcher a process
# group of its own), and it asks the ranks to save and end. The launcher would end with an error.
stopped=75 # the status of a step that was asked to end
node="set -m
accelerate launch ${options[*]@Q} --machine_rank \$SLURM_NODEID -m sparsellm train ${*@Q} &
launcher=\$!; set +m
trap 'asked=$stopped; pkill -USR1 -P \$launcher' TERM
while wait \$launcher; status=\$?; kill -0 \$launcher 2> /dev/null; do :; done
exit \${asked:-\$status}"

job() { # whether Slurm has the job in this state
  [ "$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T)" = "$1" ]
}

# Slurm signals the nodes' shells at preemption, but only this script before the time limit.
stop() {
  asked=yes
  job RUNNING || return # else Slurm is already ending it
  scancel --signal=TERM "$SLURM_JOB_ID"
  end=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e)
  end=$(date +%s --date "$end" 2> /dev/null) || return # there is no limit
  left=$((end - $(date +%s)))
  { # Whether or not the run has saved: a job that has reached its time limit is not requeued.
    sleep $((left > 120 ? left - 60 : left / 2))
    scontrol requeue "$SLURM_JOB_ID"
  } &
}
trap stop USR1 TERM

asked=
for ((attempt = 0; ; attempt++)); do
  # When one launcher has ended, the others end by themselves, or Slurm ends them after a minute.
  srun --kill-on-bad-exit=0 --wait=60 bash -c "$node" &
  step=$!
  while wait "$step"; status=$?; kill -0 "$step" 2> /dev/null; do :; done
  if ((status == 0)) || ! job RUNNING; then
    exit "$status"
  elif [ -n "$asked" ] || ((status == stopped)); then
    scontrol requeue "$SLURM_JOB_ID"
    exit # with the status of `scontrol requeue`, not that of the signal
  elif ((attempt == ${MAX_RESTARTS:-3})); then
    exit "$status"
  fi
  echo "$0: the run failed (status $status) and starts again from its last checkpoint" >&2
done
