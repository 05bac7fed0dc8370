"""Rows of answers have the fields of the values that are sent."""

import dataclasses
import typing

from slurm_elastic.core.member_orders import MemberOrders
from slurm_elastic.core.report import Orders
from slurm_elastic.rpc.answers import MembersRow, OrdersRow


def test_rows_of_orders_have_the_fields_that_are_sent():
    fields = {field.name for field in dataclasses.fields(Orders)}
    assert typing.get_type_hints(OrdersRow).keys() == fields
    # `rehearsal` is always sent, but not by every older controller.
    assert OrdersRow.__required_keys__ == Orders().to_wire().keys() - {"rehearsal"}
    members = MemberOrders(change=7).to_wire()
    assert typing.get_type_hints(MembersRow).keys() == members.keys()
