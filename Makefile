# make demo   set up, then run the first example and train a small model
# make test   set up, then run the tests
# make lint types docs   the other checks;  make bench   the CPU and host tables

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test lint types docs bench clean

# torch comes first and alone: pip then takes a CPU build where one is at hand.
$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,examples]"
	touch $@

demo: $(READY)
	$(BIN)/python examples/graph_gdn.py
	$(BIN)/python examples/train_chars.py

test: $(READY)
	$(BIN)/python -m pytest -m "not gpu" -n auto --maxprocesses 8 --dist loadfile

$(VENV)/.tools: $(READY)
	$(BIN)/python -m pip install -q -c constraints.txt -e ".[test,examples,lint,docs]"
	touch $@

lint: $(VENV)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check -q .
	$(BIN)/codespell
	$(BIN)/python -m lagraph docs --check

# On an installed wheel and from outside the root: in the root a checker sees one package only.
types: $(VENV)/.tools
	$(BIN)/python scripts/types.py

docs: $(VENV)/.tools
	$(BIN)/mkdocs build --strict -q

bench: $(READY)
	$(BIN)/python benchmarks/host.py
	$(BIN)/python benchmarks/cpu.py

clean:
	rm -rf build dist site *.egg-info
