#!/bin/bash
# A Slurm array: a run per task, each on a GPU of its own. Change what is marked, then:
#
#     sbatch sweeps/slurm-array.sh
#     nwor-bench report runs/array    # one page over all runs, also before the last one has ended
#
#SBATCH --job-name=nwor-bench
#SBATCH --array=0-3
#SBATCH --gres=gpu:1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=00:30:00
#SBATCH --output=nwor-bench-%A-%a.log
set -euo pipefail

requests=(1 8 64 256)  # change: a value per task, here of --requests
value=${requests[$SLURM_ARRAY_TASK_ID]}
run=runs/array/requests-$value

if [ -f "$run/run.json" ]; then  # this task ran before and was cut short
  exec nwor-bench sweep --resume "$run"
fi
exec nwor-bench sweep --pair llama-3b-shape --scenario ctx-1k --requests "$value" \
  --ci-width 0.5% --time-budget 15m --output "$run"  # change: your pair, prompts and budget
