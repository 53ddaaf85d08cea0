"""The service over HTTP: routes, bodies, keys and answers."""
