"""Ways to draft: a module for each kind, which `specgen.drafters.kinds` lists."""
