"""Several tokens a step: who proposes them, how many pay, and what came of them."""
