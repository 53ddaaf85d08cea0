"""The service over HTTP.

In the order a request meets them: middleware, auth, bridge, routes and schemas, and responses of errors. app puts them
together; openapi documents them; tracing is optional.
"""
