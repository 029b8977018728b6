#!/bin/sh
# Drain this node when the cloud says that it is about to take it:
#
#     ./watch.sh aws|gcp|azure
#
# Run it beside the daemon, as the same user or as root, under the same supervisor. It asks the instance's metadata service every
# CKPTD_NOTICE_POLL_S seconds and ends with the status of `ckptd drain`: 0, nothing on this node is needed any more.
# Notice: AWS spot 120 s, Google Cloud spot and preemptible 30 s, Azure spot 30 s and more.
set -eu

poll_s=${CKPTD_NOTICE_POLL_S:-2}
metadata=${CKPTD_NOTICE_URL:-http://169.254.169.254}

ask() { curl --silent --fail --max-time 2 --noproxy '*' "$@"; }

aws() { # 404 until there is a notice
    token=$(ask -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$metadata/latest/api/token") || return 1
    ask -H "X-aws-ec2-metadata-token: $token" "$metadata/latest/meta-data/spot/instance-action" >/dev/null
}

gcp() { # TRUE or FALSE
    [ "$(ask -H 'Metadata-Flavor: Google' "$metadata/computeMetadata/v1/instance/preempted")" = TRUE ]
}

azure() { # events of all machines of a scale set: only those that name this one
    name=$(ask -H 'Metadata: true' "$metadata/metadata/instance/compute/name?api-version=2021-02-01&format=text") || return 1
    ask -H 'Metadata: true' "$metadata/metadata/scheduledevents?api-version=2020-07-01" | tr '{' '\n' |
        grep -E '"EventType" *: *"(Preempt|Terminate)"' | grep -qF "\"$name\""
}

case ${1:-} in
aws) deadline=110s ;;
gcp | azure) deadline=25s ;;
*)
    echo "usage: $0 aws|gcp|azure" >&2
    exit 2
    ;;
esac

until "$1"; do
    sleep "$poll_s"
done
echo "this node is about to be taken: draining for at most $deadline" >&2
exec ckptd drain --deadline "$deadline"
