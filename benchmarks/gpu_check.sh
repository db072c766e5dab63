#!/usr/bin/env bash
# Checks parity, speed and memory on a bare machine with one CUDA GPU; nothing is installed or fetched.
# usage: benchmarks/gpu_check.sh [--model FOLDER]... ; without a GPU: --device cpu --model tiny
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TRANSFORMERS_VERBOSITY=error
exec "${PYTHON:-python3}" -m benchmarks.gpu_check "$@"
