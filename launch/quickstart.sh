#!/usr/bin/env bash
# The quickstart: make data and a tiny model, warm it up with SFT, improve it with PPO on two tensor-parallel
# processes, print what changed. `make demo` installs everything and calls this. CPU only, two cores, no network.
#
# Environment:
#   PYTHON              interpreter with megappo[reasoning] installed (default: python3)
#   MEGAPPO_DEMO_DIR    where everything is written, counted from the project (default: demo_run); an earlier demo there
#                       is replaced
#   MEGAPPO_DEMO_SFT    more KEY=VALUE settings for `megappo sft`, for example "sft.total_steps=100"
#   MEGAPPO_DEMO_PPO    more KEY=VALUE settings for `megappo train`, for example "trainer.total_iterations=80"
set -eEuo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
interpreter=${PYTHON:-python3}
run=${MEGAPPO_DEMO_DIR:-demo_run}
read -ra sft_settings <<<"${MEGAPPO_DEMO_SFT:-}"
read -ra ppo_settings <<<"${MEGAPPO_DEMO_PPO:-}"
config=yaml_configs/quickstart.yaml

export CUDA_VISIBLE_DEVICES=""          # the same on a machine with GPUs
export OMP_NUM_THREADS=1                # one core a process
export TOKENIZERS_PARALLELISM=false

python() { "$interpreter" "$@"; }
megappo() { "$interpreter" -m megappo_cli "$@"; }

step=start
trap 'echo "error: the quickstart stopped in the step: $step" >&2' ERR
begin() {
  step=$1
  printf '\n== %s  (at %d s)\n' "$step" "$SECONDS"
}
show() {
  printf '$ %s\n' "$*"
  "$@"
}

# The configuration says demo_run/; another folder is given by overrides.
sft_paths=()
ppo_paths=("model.path=$run/sft_model")
if [ "$run" != demo_run ]; then
  sft_paths=("model.path=$run/model" "sft.train_files=[$run/data/sft.parquet]" "sft.export_path=$run/sft_model")
  ppo_paths+=("data.train_files=[$run/data/train.parquet]" "data.val_files=[$run/data/test.parquet]"
    "trainer.output_dir=$run/ppo")
fi
rm -rf "$run"/{data,model,sft,sft_model,ppo}

begin "1/5 data: sums of two numbers up to 100, from reasoning_gym"
show python -m megappo.data.prepare.reasoning_gym --task basic_arithmetic --plain \
  --config min_terms=2 --config max_terms=2 --config min_digits=2 --config max_digits=2 --config 'operators=["+"]' \
  --config allow_parentheses=false --config allow_negation=false \
  --train-size 8000 --test-size 512 --out "$run/data" --sft-out "$run/data/sft.parquet"

begin "2/5 model: random weights and a tokenizer of its own"
show python -m megappo.data.prepare.tiny_model --out "$run/model" --data "$run/data/train.parquet" \
  --hidden 96 --layers 3 --heads 12

begin "3/5 warm start: supervised fine-tuning, two data-parallel processes"
# Quiet: one line a step would be too many. The numbers are in $run/sft/metrics.jsonl.
show megappo sft "$config" --nproc 2 "trainer.output_dir=$run/sft" "trainer.logger=[tensorboard,jsonl]" \
  "${sft_paths[@]}" "${sft_settings[@]}"

begin "4/5 PPO: two tensor-parallel processes"
ppo=(train "$config" --nproc 2 "${ppo_paths[@]}" "${ppo_settings[@]}")
show megappo "${ppo[@]}"

begin "5/5 what changed"
python -m megappo_cli.demo_table "$run/ppo/metrics.jsonl"
cat <<EOF

curves       tensorboard --logdir $run          (the same numbers: $run/ppo/metrics.jsonl)
answers      $run/ppo/samples.jsonl
checkpoints  $run/ppo/checkpoints
model        $run/ppo/final_hf                  (a Hugging Face folder; before PPO: $run/sft_model)

more iterations, from the last checkpoint:
  ${interpreter#"$PWD"/} -m megappo_cli ${ppo[*]} trainer.total_iterations=100

done in $SECONDS s
EOF
