#!/usr/bin/env bash
# Runs a command on N simulated CPU devices, to try a mesh without the hardware:
#
#     launch/simulate.sh 4 jaxformer train configs/quickstart.py mesh.fsdp=4 train.steps=100 workdir=runs/fsdp
set -euo pipefail
if [ "$#" -lt 2 ] || ! [[ "$1" =~ ^[1-9][0-9]*$ ]]; then
  echo "usage: $0 DEVICES COMMAND [ARGUMENT ...]" >&2
  exit 2
fi
devices="$1"
shift
export JAX_PLATFORMS=cpu
export XLA_FLAGS="${XLA_FLAGS:-} --xla_force_host_platform_device_count=$devices"
exec "$@"
