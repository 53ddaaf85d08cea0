#!/usr/bin/env bash
# Make the secrets that compose.yaml mounts, once: docker/secrets.sh. What exists is kept.
set -euo pipefail
cd "$(dirname "$0")"
secrets=secrets
key() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# Compose mounts the files as they are, and each container reads them as a user of its own: the directory keeps other
# users of this host out, the files are readable.
mkdir -p "$secrets"
chmod 0700 "$secrets"
umask 022
for name in client_key metrics_key admin_keys grafana_password; do
    [[ -s $secrets/$name ]] || key >"$secrets/$name"
done
# The service takes any of api_keys, one a line; Prometheus sends metrics_key.
[[ -s $secrets/api_keys ]] || { cat "$secrets/client_key" && echo && cat "$secrets/metrics_key"; } >"$secrets/api_keys"
echo "$PWD/$secrets: client_key for requests, admin_keys for changes, grafana_password for the user admin"
