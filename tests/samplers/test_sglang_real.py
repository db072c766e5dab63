"""The real server that all tests share."""

import psutil

from tests.samplers.support_sglang import generate, greedy
from xorl_lab.samplers.sglang import process as sglang_process


def test_a_real_server_serves_the_model(sglang_server):
    assert sglang_server.alive
    assert sglang_process.answers_health(sglang_server.port, 30)
    answer = generate(sglang_server.url, [72, 101, 108])
    assert answer["output_ids"] == greedy("tiny", [72, 101, 108])


def test_a_real_server_is_on_this_machine_alone(sglang_server):
    found = [
        taken.laddr
        for process in sglang_server.processes()
        for taken in process.net_connections("tcp")
        if taken.status == psutil.CONN_LISTEN
    ]
    assert sglang_server.port in {address.port for address in found}
    assert {address.ip for address in found} == {"127.0.0.1"}
