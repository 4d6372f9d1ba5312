"""The page imports files of vectors."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet

vectors = pa.FixedSizeListArray.from_arrays(pa.array(np.ones(24, np.float32)), 8)
pyarrow.parquet.write_table(pa.table({"id": [17, 42, -5], "embedding": vectors}), "vectors.parquet")

Path("item.csv").write_text("id,x,y\n-9223372036854775808,0.1,-0.0\n17,nan,1e-45\n9223372036854775807,3.4028235e38,7\n")
