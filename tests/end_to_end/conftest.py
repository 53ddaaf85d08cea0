from __future__ import annotations

from tests.s3 import s3 as s3
from tests.s3 import s3_server as s3_server
