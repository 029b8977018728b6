#!/bin/sh
# Start this node's ckptd beside torchrun, unless it runs already, then become torchrun:
#
#     ./launch.sh --nnodes=4 --node-rank=$RANK --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29500 train.py
#
# The daemon is a session of its own: it outlives the trainers, so that the next start finds its memory. Settings are those of
# `ckptd config`: /etc/ckptd/ckptd.toml or CKPTD_* variables (CKPTD_SOCKET holds for the daemon and for the trainers).
set -eu

log=${CKPTD_LOG:-${TMPDIR:-/tmp}/ckptd-$(id -u).log}
wait_s=${CKPTD_WAIT_S:-60}

if ! ckptd status >/dev/null 2>&1; then
    setsid ckptd run >>"$log" 2>&1 </dev/null &
    daemon=$!
    waited=0
    until ckptd status >/dev/null 2>&1; do
        if ! kill -0 "$daemon" 2>/dev/null; then
            echo "ckptd ended while starting; the end of $log:" >&2
            tail -n 20 "$log" >&2
            exit 1
        fi
        if [ "$waited" -ge "$wait_s" ]; then
            echo "ckptd was not up after $wait_s s, see $log; training starts without it" >&2
            break
        fi
        sleep 1
        waited=$((waited + 1))
    done
fi

exec torchrun "$@"
