#!/usr/bin/env bash
# Start one megappo command on one or several nodes with torchrun. Run it once on every node.
set -euo pipefail

usage() {
    cat <<'TEXT'
usage: launch/torchrun.sh [options] COMMAND CONFIG [key=value ...]

Runs `megappo COMMAND CONFIG ...` (train, sft, reward-model) with one process a GPU. On several nodes run the same line on every
node; only --node-rank differs.

options (or the environment variable, used when the option is absent):
  --nnodes N           NNODES          number of nodes                               (1)
  --node-rank R        NODE_RANK       this node's number, 0 .. N-1                   (0)
  --nproc-per-node G   NPROC_PER_NODE  processes on this node          (GPUs found, or 1)
  --master-addr HOST   MASTER_ADDR     address of node 0; required with several nodes
  --master-port PORT   MASTER_PORT     a free port on node 0                      (29500)
  --max-restarts N     MAX_RESTARTS    start all ranks again after a failure, up to N times; they resume
                                       from the last checkpoint                       (0)
  --log-dir DIR        LOG_DIR         a log for each rank in DIR; the console shows local rank 0 only
  --no-check                           do not run `megappo doctor` first
  --dry-run                            print the command and stop
  -h, --help                           this text

PYTHON is the interpreter to use (default: python3).

With --max-restarts N the ports from --master-port to --master-port + N on node 0 are used, one an attempt. Give every
node the same N.

examples:
  launch/torchrun.sh train exp.yaml trainer.seed=2
  launch/torchrun.sh --max-restarts 3 --log-dir logs train exp.yaml
  launch/torchrun.sh --nnodes 2 --node-rank 0 --master-addr node0 train exp.yaml    # on node0
  launch/torchrun.sh --nnodes 2 --node-rank 1 --master-addr node0 train exp.yaml    # on node1
TEXT
}

fail() {
    echo "error: $1 (launch/torchrun.sh --help)" >&2
    exit 2
}

is_number() {
    [[ $1 =~ ^(0|[1-9][0-9]*)$ ]]
}

gpus() {
    local count=0
    if command -v nvidia-smi >/dev/null; then
        count=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
    fi
    echo $((count > 0 ? count : 1))
}

nnodes=${NNODES:-1}
node_rank=${NODE_RANK:-0}
nproc=${NPROC_PER_NODE:-}
master_addr=${MASTER_ADDR:-}
master_port=${MASTER_PORT:-29500}
max_restarts=${MAX_RESTARTS:-0}
log_dir=${LOG_DIR:-}
check=true
dry_run=false

while (($#)); do
    case $1 in
        --nnodes | --node-rank | --nproc-per-node | --master-addr | --master-port | --max-restarts | --log-dir)
            (($# > 1)) || fail "$1 needs a value"
            case $1 in
                --nnodes) nnodes=$2 ;;
                --node-rank) node_rank=$2 ;;
                --nproc-per-node) nproc=$2 ;;
                --master-addr) master_addr=$2 ;;
                --master-port) master_port=$2 ;;
                --max-restarts) max_restarts=$2 ;;
                --log-dir) log_dir=$2 ;;
            esac
            shift 2
            ;;
        --no-check) check=false && shift ;;
        --dry-run) dry_run=true && shift ;;
        -h | --help) usage && exit 0 ;;
        --) shift && break ;;
        -*) fail "unknown option $1" ;;
        *) break ;;
    esac
done

(($#)) || fail "no command given"
nproc=${nproc:-$(gpus)}
for pair in "nnodes $nnodes" "node-rank $node_rank" "nproc-per-node $nproc" "master-port $master_port" \
    "max-restarts $max_restarts"; do
    is_number "${pair#* }" || fail "--${pair% *} must be a number, not '${pair#* }'"
done
((nnodes >= 1 && nproc >= 1)) || fail "--nnodes and --nproc-per-node must be at least 1"
((node_rank < nnodes)) || fail "--node-rank $node_rank is not below --nnodes $nnodes"
if ((nnodes > 1)) && [[ -z $master_addr ]]; then
    fail "--master-addr is required with several nodes"
fi

# Attempt k meets on port + k: a node that comes early cannot meet the remains of the last attempt.
build_command() {
    command=(
        "${PYTHON:-python3}" -m torch.distributed.run
        --nnodes "$nnodes" --node-rank "$node_rank" --nproc-per-node "$nproc"
        --master-addr "${master_addr:-127.0.0.1}" --master-port "$((master_port + $1))"
    )
    shift
    if [[ -n $log_dir ]]; then
        command+=(--log-dir "$log_dir" --redirects 3 --tee 0:3)
    fi
    command+=(-m megappo_cli "$@")
}

build_command 0 "$@"
if $dry_run; then
    printf '%q ' "${command[@]}"
    echo
    exit 0
fi
if $check && ! findings=$("${PYTHON:-python3}" -m megappo_cli doctor 2>&1); then
    echo "$findings" >&2
    fail "this node cannot train, see above; --no-check starts anyway"
fi
if ((max_restarts == 0)); then
    exec "${command[@]}"
fi

# torchrun's own --max-restarts counts on each node apart, and nodes that disagree never meet: each attempt is a new
# torchrun here, on every node. When one ends with an error the ranks of the others do too, within
# trainer.distributed_timeout_s.
agent=
stopping=false
# shellcheck disable=SC2329 # called by the trap
stop() {
    stopping=true
    if [[ -n $agent ]]; then kill -TERM "$agent" 2>/dev/null || true; fi
}
trap stop INT TERM HUP
for ((attempt = 0; ; attempt++)); do
    build_command "$attempt" "$@"
    "${command[@]}" &
    agent=$!
    code=0
    wait "$agent" || code=$?
    if $stopping; then
        wait "$agent" || true
        exit "$code"
    fi
    if ((code == 0 || attempt >= max_restarts)); then
        exit "$code"
    fi
    echo "torchrun.sh: ended with $code; restart $((attempt + 1)) of $max_restarts" >&2
done
