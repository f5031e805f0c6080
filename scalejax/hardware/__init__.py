"""Specifications of chips and clusters as plain data, each number with its source.

The catalogue is the files in `chips/`, `clusters/`, `libraries/`, `dispatch/`, `matmul_rates/` and
`grouped_matmul_rates/` beside this one; a user's own chip or cluster has the format of these files.
Knows specifications and measured rates, not how long a program takes.
"""

from scalejax.hardware.catalogue import (
    chip_names,
    cluster_names,
    load_chip,
    load_cluster,
    load_cluster_and_site,
    load_dispatch,
    load_library,
    load_site,
    save_cluster,
    with_conditions,
)
from scalejax.hardware.chip import (
    Attainable,
    Chip,
    CudaArchitecture,
    RateType,
    Residuals,
    TpuArchitecture,
)
from scalejax.hardware.cluster import (
    Cluster,
    CollectiveMethod,
    CommunicationLibrary,
    DispatchLibrary,
    DispatchRates,
    HostMemory,
    Link,
    Network,
    SharedChip,
)
from scalejax.hardware.host import (
    CopyRates,
    FileWork,
    HostInput,
    InputRates,
    ReadRates,
    SampleWork,
    Speedups,
    TakeRates,
)
from scalejax.hardware.measured import MeasuredRates
from scalejax.hardware.site import NO_SITE, CalibratedRange, RunConditions, Site
from scalejax.hardware.tables import (
    GroupedMatmulRates,
    MatmulForm,
    MatmulTable,
    MeasuredTimes,
    grouped_matmul_names,
    load_grouped_matmul_rates,
    load_matmul_table,
    load_measured_times,
    matmul_table_names,
)

__all__ = [
    "NO_SITE",
    "Attainable",
    "CalibratedRange",
    "Chip",
    "Cluster",
    "CollectiveMethod",
    "CommunicationLibrary",
    "CopyRates",
    "CudaArchitecture",
    "DispatchLibrary",
    "DispatchRates",
    "FileWork",
    "GroupedMatmulRates",
    "HostInput",
    "HostMemory",
    "InputRates",
    "Link",
    "MatmulForm",
    "MatmulTable",
    "MeasuredRates",
    "MeasuredTimes",
    "Network",
    "RateType",
    "ReadRates",
    "Residuals",
    "RunConditions",
    "SampleWork",
    "SharedChip",
    "Site",
    "Speedups",
    "TakeRates",
    "TpuArchitecture",
    "chip_names",
    "cluster_names",
    "grouped_matmul_names",
    "load_chip",
    "load_cluster",
    "load_cluster_and_site",
    "load_dispatch",
    "load_grouped_matmul_rates",
    "load_library",
    "load_matmul_table",
    "load_measured_times",
    "load_site",
    "matmul_table_names",
    "save_cluster",
    "with_conditions",
]
