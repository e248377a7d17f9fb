# The prompts are downloaded when first needed; which model to improve is the user's choice.

BASE ?=
ifeq ($(BASE),)
ifneq ($(filter rounds generate select finetune eval,$(MAKECMDGOALS)),)
$(error Which model? Add BASE=, a hub id or a folder, such as BASE=HuggingFaceTB/SmolLM2-1.7B-Instruct)
endif
endif

# The paper fine-tunes the base policy, not the one before.
INIT ?= base

# The script writes this file last.
NEEDS := ../runs/gsm8k-prompts/held_out.jsonl

$(NEEDS): | $(INSTALLED)
	"$(VENV)/bin/python" make_gsm8k.py "$(@D)"
