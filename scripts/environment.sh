# Sourced by scripts/test.sh and examples/quickstart.sh: `prepare_environment` leaves a Python with the tested set
# in $PYTHON.
#
# An active virtual environment is used as it is; otherwise .venv is made beside this repository. Nothing is installed
# again while requirements/pinned.txt and setup.py are unchanged. PYTHON=/path/to/python chooses the interpreter that
# makes .venv; USE_CURRENT_ENVIRONMENT=1 uses that interpreter itself and installs nothing.

# The first interpreter between 3.10 and 3.13 on the path, 3.11 (the tested one) before the others.
find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3.10 python3 python}; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    echo "no Python 3.10 to 3.13 found; set PYTHON=/path/to/python" >&2
    return 1
}

# make_venv DIRECTORY INTERPRETER: with the interpreter's own pip where it lacks ensurepip (Debian without python3-venv).
make_venv() {
    "$2" -m venv "$1" 2>/dev/null && return
    rm -rf "$1"
    "$2" -m venv --without-pip "$1"
    "$2" -m pip --python "$1/bin/python" install --progress-bar off pip
}

prepare_environment() {
    local root=$1 venv stamp wanted
    if [[ ${USE_CURRENT_ENVIRONMENT:-0} == 1 ]]; then
        PYTHON=$(find_python)
        echo "using $PYTHON as it is"
        return
    fi
    venv=${VIRTUAL_ENV:-$root/.venv}
    if [[ ! -x $venv/bin/python ]]; then
        local interpreter
        interpreter=$(find_python)
        echo "making the virtual environment $venv with $interpreter"
        make_venv "$venv" "$interpreter"
    fi
    PYTHON=$venv/bin/python
    stamp=$venv/.installed_from
    wanted=$(cat "$root/requirements/pinned.txt" "$root/setup.py"; echo "$root")
    if [[ -f $stamp && $(cat "$stamp") == "$wanted" ]]; then
        echo "using $venv, where everything is installed"
        return
    fi
    echo "installing requirements/pinned.txt and the package into $venv"
    "$PYTHON" -m pip install --disable-pip-version-check -r "$root/requirements/pinned.txt"
    "$PYTHON" -m pip install --disable-pip-version-check --no-deps --no-build-isolation -e "$root"
    printf '%s\n' "$wanted" > "$stamp"
}
