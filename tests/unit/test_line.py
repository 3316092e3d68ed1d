"""A connection to a store's host, on which nothing is said."""

from __future__ import annotations

import socket

import torch.distributed as dist

from minidp._line import Line, line_to


def test_it_is_cut_when_the_host_of_the_store_goes():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    line = line_to(dist.PrefixStore("a", dist.PrefixStore("b", client)))
    assert line is line_to(client)
    client.set("here", "yes")
    assert not line.is_cut()
    del server
    line._socket.settimeout(10)  # until the system has closed it
    assert line.is_cut()


def test_who_does_not_listen_is_not_gone():
    """The store has to find out."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False)
    create, socket.create_connection = socket.create_connection, refuse
    try:
        line = Line(("127.0.0.1", client.port))
    finally:
        socket.create_connection = create
    assert not line.is_cut()


def refuse(*_):
    raise ConnectionRefusedError


def test_other_stores_have_no_host():
    assert not line_to(dist.HashStore()).is_cut()
