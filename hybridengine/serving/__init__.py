"""The server for Tinker clients: wire format, bookkeeping, order of requests, HTTP."""
