"""JSON of requests and answers, a file for each file of routes: requests are validated by it, answers documented."""
