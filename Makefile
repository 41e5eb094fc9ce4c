# Every target sets itself up, on nothing but Python 3.11 or newer with venv and pip.
#   make demo                        the digits example on a cluster of its own, until Ctrl-C
#   make demo ARGS="--once --port 0" measure, then end
#   make demo-chat                   chat with a small model, until Ctrl-C
#   make test ARGS="-m 'not slow'"   ARGS go to pytest
#   make nightly                     all tests, and 10,000 generated cases of each kind
#   make check                       format, lint, types, layers
#   make docs                        build the site of the documentation into site/; warnings are errors
#   make docs-serve                  show it at http://127.0.0.1:8010, and build it again when a page changes
#   PYTHON=python3.12 make test      which interpreter to make .venv with

export PYTHON
.PHONY: demo demo-chat test nightly check docs docs-serve

demo: .venv/.installed
	.venv/bin/python examples/digits/demo.py $(ARGS)

demo-chat: .venv/.installed
	.venv/bin/python examples/chat/chat_demo.py $(ARGS)

test: .venv/.installed
	scripts/test $(ARGS)

nightly: .venv/.installed
	scripts/nightly $(ARGS)

check: .venv/.installed
	scripts/check

docs: .venv/.docs
	$(MKDOCS) build
	@echo "Built site/index.html"

docs-serve: .venv/.docs
	$(MKDOCS) serve --dev-addr 127.0.0.1:8010

MKDOCS = NO_MKDOCS_2_WARNING=true .venv/bin/python -m mkdocs

.venv/.docs: .venv/.installed
	.venv/bin/python -m pip install --quiet --disable-pip-version-check --editable '.[docs]'
	touch .venv/.docs

.venv/.installed: setup.py scripts/setup
	scripts/setup
