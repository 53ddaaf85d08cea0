"""Define the JSON of requests and answers, one file per file of routes: requests are validated, answers documented."""
