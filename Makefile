# Every target sets up .venv by itself. Paths are relative, so the clone may live anywhere.
PYTHON ?= python3
RUN = .venv/bin/python
# two workers, one torch thread each; tests that share what is slow to make stay together, unless a worker has none left
PYTEST = OMP_NUM_THREADS=1 $(RUN) -m pytest -n 2 --dist worksteal

.PHONY: setup demo test check site integrations zoo release clean

setup: .venv/.done

.venv/.done: pyproject.toml
	$(PYTHON) -m venv .venv
	$(RUN) -m pip install -e ".[dev]"
	touch .venv/.done

demo: setup  ## prune, export and report on handwritten digits
	$(RUN) -m dmcp demo

test: setup
	$(PYTEST)

check: setup
	$(RUN) -m ruff format --check .
	$(RUN) -m ruff check .
	$(RUN) -m mypy
	@if $(RUN) -c "import mkdocs" 2>/dev/null; then $(RUN) -m mkdocs build -q; fi
	$(PYTEST)

site: setup  ## the documentation site, in build/site
	$(RUN) -m pip install -q -e ".[docs]"
	$(RUN) -m mkdocs build -q

integrations: .venv-integrations/.done  ## Ultralytics and other libraries, in an environment of their own
	OMP_NUM_THREADS=1 .venv-integrations/bin/python -m pytest tests/integrations

.venv-integrations/.done: pyproject.toml
	$(PYTHON) -m venv .venv-integrations
	.venv-integrations/bin/python -m pip install -e ".[dev,integrations]"
	touch .venv-integrations/.done

zoo: setup  ## every model through one contract; make zoo ARGS=--help
	$(RUN) -m zoo $(ARGS)

release: setup  ## build wheel and source archive, and try them in an empty environment; all but the upload
	$(RUN) -m pip install -q -e ".[release]"
	$(RUN) tools/release.py

clean:  ## caches and builds; runs, data and .venv stay
	rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache
	find src tests examples experiments zoo benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
