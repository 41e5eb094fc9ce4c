# Every target sets itself up, on nothing but Python 3.11 or newer with venv and pip.
#   make demo                        the digits example on a cluster of its own, until Ctrl-C
#   make demo ARGS="--once --port 0" measure, then end
#   make test ARGS="-m 'not slow'"   ARGS go to pytest
#   make nightly                     all tests, and 10,000 generated cases of each kind
#   make check                       format, lint, types, layers
#   PYTHON=python3.12 make test      which interpreter to make .venv with

export PYTHON
.PHONY: demo test nightly check

demo: .venv/.installed
	.venv/bin/python examples/digits/demo.py $(ARGS)

test: .venv/.installed
	scripts/test $(ARGS)

nightly: .venv/.installed
	scripts/nightly $(ARGS)

check: .venv/.installed
	scripts/check

.venv/.installed: setup.py scripts/setup
	scripts/setup
