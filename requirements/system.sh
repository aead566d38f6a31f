#!/usr/bin/env bash
# Installs what is missing of Debian's packages where that is allowed; otherwise one line says what to install.
set -euo pipefail
missing=()
libraries=$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p)
have_lib() { [[ $libraries == *"$1"* ]]; }
have_lib libibverbs.so.1 || missing+=(libibverbs1)
have_lib libnuma.so.1 || missing+=(libnuma1)
have_lib libcurl.so.4 || missing+=(libcurl4)
command -v bwrap >/dev/null || missing+=(bubblewrap)
"${PYTHON:-python3}" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
[ ${#missing[@]} -eq 0 ] && exit 0
if command -v apt-get >/dev/null; then
  if [ "$(id -u)" = 0 ]; then as_root=(); else as_root=(sudo -n); fi
  if [ "$(id -u)" = 0 ] || sudo -n true 2>/dev/null; then
    echo "setup: installing ${missing[*]}"
    "${as_root[@]}" apt-get update -qq
    if "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; then exit 0; fi
  fi
fi
echo "setup: please install these packages, then run make again: apt-get install ${missing[*]}" >&2
exit 1
