"""The service over HTTP.

In the order a request meets them: middleware, auth, routes, requests, schemas, and responses on the way out. app
puts them together; openapi documents them; tracing is optional.
"""
