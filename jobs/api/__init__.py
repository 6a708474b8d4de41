"""The REST API, `/api/v1`: requests to services and rows to JSON. Decides nothing by itself."""
