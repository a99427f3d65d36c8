"""The server's endpoints; `specgen.serve.server.app` has the table of their paths."""
