"""The page imports a file of vectors."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet

vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(24, np.float32)), 8)
pyarrow.parquet.write_table(pa.table({"id": [17, 42, -5], "embedding": vectors}), "vectors.parquet")
