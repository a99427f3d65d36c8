"""The method: drafts, their verification, the loop over them, and what both rest on (policies,
drafters, samplers, grammars). Nothing here knows llama.cpp or a file."""
