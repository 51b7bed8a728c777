#!/bin/sh
# Installs what the tests of `make test-all` start: Debian's Docker, Podman, runc, crun and gVisor, skopeo and umoci,
# PostgreSQL, PgBouncer, Chromium, promtool, a static busybox for the image, curl for the examples of the docs, and libgomp for benchmarks that
# run llama.cpp without Penstock. Nothing is started. Does nothing where all are there, and only says
# so where it can't help.
set -eu

missing=""
for program in dockerd podman runc crun runsc skopeo umoci busybox conmon catatonit unshare setpriv curl psql pgbouncer chromium promtool; do
    command -v "$program" >/dev/null 2>&1 || missing="$missing $program"
done
[ -n "$missing" ] || exit 0

if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
    echo "some tests will be skipped, for want of:$missing (root and apt-get would install them)"
    exit 0
fi
echo "installing container engines and tools for the tests (missing:$missing)"
export DEBIAN_FRONTEND=noninteractive
# An engine must not start by itself; each test starts its own.
guard=/usr/sbin/policy-rc.d
if [ ! -e "$guard" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$guard" && chmod 755 "$guard"
    trap 'rm -f "$guard"' EXIT
fi
apt-get update -qq
apt-get install -y -qq --no-install-recommends \
    docker.io podman runc crun runsc skopeo umoci busybox-static conmon catatonit tini util-linux \
    curl libgomp1 postgresql pgbouncer chromium prometheus >/dev/null
