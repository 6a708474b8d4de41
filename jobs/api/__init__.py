"""The REST API `/api/v1`: parses requests, calls actions, serializes rows. Contains no rules of its own."""
