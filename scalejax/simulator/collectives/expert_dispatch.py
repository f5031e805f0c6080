"""Seconds of sending tokens to their experts, or back, by a library that sends no token twice.

Depends on the route of a group, the routing of tokens and the rates of a library, not on programs
or placement. A plain all-to-all of the same tokens is in `point_to_point`.
"""

from math import comb

from scalejax.core.errors import ConfigError, refusal
from scalejax.hardware import DispatchLibrary
from scalejax.simulator.collectives.route import Route
from scalejax.simulator.program import RoutedTokens


def dispatch_seconds(
    payload_bytes: int,
    tokens: RoutedTokens,
    route: Route,
    library: DispatchLibrary,
    *,
    chip: str,
) -> float:
    """Time until every device has the tokens of its experts, or every token its results.

    A token of b bytes crosses the network once for each node with one of its experts, to the device
    with its sender's position there, and from there the links once for each device with one:
    seconds = base + tokens x token time
            + max(tokens b devices / link, g tokens b (nodes reached elsewhere) / network,
                  tokens (nodes reached elsewhere) message time),
    for g devices of the group in a node, which share the network. A combine is the same backwards.
    A token's own device counts as one of the devices, as the kernels copy there too. Left out:
    congestion, which took 2.7 times as long over 8 nodes of one measured machine, and the
    difference between a dispatch and a combine of equal bytes: each alone is off by 8 to 19 % in
    the mean, the sum of both by 6 to 8 % (`experiments/expert_dispatch`).

    Args:
        payload_bytes: bytes of a copy of each token of one device for each of its experts.
        tokens: the tokens, and how they are routed.
        route: links between the members of the group.
        library: the library's rates.
        chip: name of the chip of every device.
    Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", arXiv 2412.19437, section 3.2.2.
    """
    if route.members == 1:
        return 0.0
    rates = library.rates_on(chip)
    once = payload_bytes / tokens.experts_per_token
    devices, nodes = expected_reach(tokens, route.members, route.nodes)
    link = min(rates.link_bytes_per_second, route.link_bytes_per_second)
    inside, between = once * devices / link, 0.0
    alone = rates.base_seconds + tokens.tokens * rates.token_seconds
    if route.network_bytes_per_second is not None:
        elsewhere = nodes * (route.nodes - 1) / route.nodes
        rate = route.network_bytes_per_second * library.network_fraction
        between = route.members_per_node * once * elsewhere / rate
        between = max(between, tokens.tokens * elsewhere * rates.message_seconds)
        alone += library.network_seconds + route.network_message_seconds
    return alone + max(inside, between)


def expected_reach(tokens: RoutedTokens, devices: int, nodes: int) -> tuple[float, float]:
    """Expected (devices, nodes) of the group that hold an expert of a token, if all are equally
    likely.

    With E experts on D devices, C(E - E/D, k) of the C(E, k) choices of k experts avoid a device.
    A token that is limited to some nodes chooses among their experts.

    Raises:
        ConfigError: if the devices do not divide the experts.
    """
    if tokens.experts % devices:
        accepted = f"the {devices} devices of the group must divide them"
        raise ConfigError(refusal("tokens.experts", tokens.experts, accepted))
    used = nodes if tokens.most_nodes is None else min(nodes, tokens.most_nodes)
    per_device, per_node = tokens.experts // devices, tokens.experts // nodes
    eligible = used * per_node
    chosen = min(tokens.experts_per_token, eligible)

    def reached(places: int, its: int) -> float:
        return places * (1 - comb(eligible - its, chosen) / comb(eligible, chosen))

    return reached(used * devices // nodes, per_device), reached(used, per_node)
