"""The pure core: requests, plans, KV memory, policies, scheduler. Imports only the standard library."""
