"""The ports of Spark's driver on this machine: a process without the secret is not listened to."""

from __future__ import annotations

import socket
import struct

from pyspark.sql import SparkSession

_RPC_REQUEST = 3


def test_a_stranger_who_sends_the_driver_a_request_is_refused_unread(spark: SparkSession) -> None:
    conf = spark.sparkContext.getConf()
    host, port = conf.get("spark.driver.host"), conf.get("spark.driver.port")
    assert host is not None
    assert port is not None
    body = b"x" * 16
    message = struct.pack(">bqi", _RPC_REQUEST, 7, len(body)) + body
    with socket.create_connection((host, int(port)), 10) as stranger:
        stranger.settimeout(10)
        stranger.sendall(struct.pack(">q", 8 + len(message)) + message)
        answer = stranger.recv(4096)
    assert b"Expected SaslMessage" in answer
    assert spark.range(1000).repartition(2).count() == 1000
