# `make demo` and `make test` work on a fresh clone: each first makes .venv and installs the pinned dependencies.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt torch==2.13.0
	$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[report,flower,privacy,sonar,track,dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(VENV)/bin/fedbayes demo

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/pyright

test: $(STAMP) lint
	OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist worksteal --durations=15

clean:
	rm -rf $(VENV) runs build dist
