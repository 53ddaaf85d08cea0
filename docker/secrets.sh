#!/usr/bin/env bash
# Make the secrets that the compose files and Kubernetes mount, once: docker/secrets.sh. What exists is kept.
set -euo pipefail
cd "$(dirname "$0")"
secrets=secrets
key() { od -An -N32 -tx1 /dev/urandom | tr -d ' \n'; }

# Compose mounts the files as they are, and each container reads them as a user of its own: the directory keeps other
# users of this host out, the files are readable.
mkdir -p "$secrets"
chmod 0700 "$secrets"
umask 022
for name in client_key metrics_key admin_keys grafana_password postgres_password store_password; do
    [[ -s $secrets/$name ]] || key >"$secrets/$name"
done
# The service takes any of api_keys, one a line; Prometheus sends metrics_key.
[[ -s $secrets/api_keys ]] || { cat "$secrets/client_key" && echo && cat "$secrets/metrics_key"; } >"$secrets/api_keys"
# libpq reads a password from a service file whoever may read that; from a password file only if it is its own.
[[ -s $secrets/pg_service ]] || printf '[longtail]\nhost=postgres\nuser=longtail\ndbname=longtail\npassword=%s\n' \
    "$(cat "$secrets/postgres_password")" >"$secrets/pg_service"
[[ -s $secrets/aws ]] || printf '[default]\naws_access_key_id = longtail\naws_secret_access_key = %s\n' \
    "$(cat "$secrets/store_password")" >"$secrets/aws"
echo "$PWD/$secrets: client_key for requests, admin_keys for changes, grafana_password for the user admin"
