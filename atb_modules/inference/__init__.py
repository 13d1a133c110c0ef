"""Generation: prompts in, tokens out, over the paged cache; and the plan for steps of one token."""
