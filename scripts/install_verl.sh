#!/usr/bin/env bash
# Make an environment for CPUs with this project and verl 0.9.1, in some minutes:
#
#   scripts/install_verl.sh FOLDER [PYTHON]
#
# PYTHON is Python 3.11, by default python3.11. Variables that pip reads (PIP_EXTRA_INDEX_URL, ...) apply. On GPU nodes,
# install this project as docs/how-to/cluster.md says and then, without dependencies, requirements/verl.txt.
set -euo pipefail

if [[ $# -lt 1 || $1 == -* ]]; then
  sed -n '2,7s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
  exit 2
fi
python=${2:-python3.11}
mkdir -p "$(dirname "$1")"
folder=$(cd "$(dirname "$1")" && pwd)/$(basename "$1")
cd "$(dirname "${BASH_SOURCE[0]}")/.."

"$python" -c 'import sys; sys.exit(0 if sys.version_info[:2] == (3, 11) else f"{sys.executable} is Python "
    + ".".join(map(str, sys.version_info[:2])) + ", which must be 3.11, whose lock is tried with verl; name another")'
"$python" -m venv "$folder" || {
  # Where Python's ensurepip is missing (Debian without python3-venv), the outer pip puts a pip into the environment.
  "$python" -m venv --clear --without-pip "$folder"
  "$python" -m pip --python "$folder/bin/python" install pip
}
install=("$folder/bin/python" -m pip install --quiet --no-deps --progress-bar off)
"${install[@]}" -r requirements/cpu.lock.txt
"${install[@]}" -r requirements/verl.txt
"${install[@]}" --no-build-isolation -e .
rm -rf "$folder"/lib/python3.11/site-packages/tests # of verl's wheel: they would hide a project's own package `tests`
echo "Ready: $folder/bin/python -m verl.trainer.main_ppo ... (docs/how-to/verl.md)"
