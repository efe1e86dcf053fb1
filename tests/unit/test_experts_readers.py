"""Routing that servers return, built byte by byte here; draft trees against sets; routing streamed to its file."""

from __future__ import annotations

import base64
import io
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from moe_models import mixtral, qwen3_moe

from labkit import experts, targets
from labkit.experts import BadRouting, Routing
from labkit.files import BrokenFile

# Four layers, of which vLLM and SGLang return all: the first is dense, the others hold 9 experts, 2 a token.
GEOMETRY = targets.geometry(
    {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 2,
        "vocab_size": 64,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "n_routed_experts": 9,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
)


def rows(seed: int, tokens: int) -> np.ndarray:
    drawn = np.random.default_rng(seed).random((tokens, 4, 9)).argsort(axis=2)[:, :, :2].astype(np.uint8)
    drawn[:, 0] = 0
    return drawn


def npy(array: np.ndarray) -> str:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


def flat(array: np.ndarray) -> str:
    return base64.b64encode(array.astype("<i4").tobytes()).decode()


FIRST, SECOND = rows(0, 5), rows(1, 3)
VLLM = {
    "arrays": [FIRST, SECOND],
    "completion outputs": [SimpleNamespace(routed_experts=FIRST), SimpleNamespace(routed_experts=SECOND)],
    "request output": [
        SimpleNamespace(outputs=[SimpleNamespace(routed_experts=FIRST), SimpleNamespace(routed_experts=SECOND)])
    ],
    "endpoint": [{"choices": [{"routed_experts": npy(FIRST)}, {"routed_experts": npy(SECOND)}]}],
}
SGLANG = {
    "texts": [flat(FIRST), flat(SECOND)],
    "generate": [{"meta_info": {"routed_experts": flat(FIRST)}}, {"meta_info": {"routed_experts": flat(SECOND)}}],
    "endpoint": [{"choices": [{"sgl_ext": {"routed_experts": flat(array)}} for array in (FIRST, SECOND)]}],
}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("read", "outputs"),
    [(experts.from_vllm, given) for given in VLLM.values()]
    + [(experts.from_sglang, given) for given in SGLANG.values()],
    ids=[*(f"vllm {name}" for name in VLLM), *(f"sglang {name}" for name in SGLANG)],
)
def test_what_servers_return_takes_the_common_form(read, outputs, streamed, tmp_path):
    path = tmp_path / "routing.safetensors" if streamed else None
    kinds = ["prose", "code"][: len(outputs)]
    routing = read(outputs, GEOMETRY, tokens=[6, 4], categories=kinds, path=path)
    np.testing.assert_array_equal(routing.experts, np.concatenate([FIRST, SECOND])[:, 1:])
    assert routing.documents.tolist() == [0] * 5 + [1] * 3
    assert (routing.layers, routing.num_experts, routing.chosen) == ((1, 2, 3), 9, 2)
    assert routing.categories == (("prose", "code") if len(outputs) == 2 else ("prose", "prose"))
    assert ("vLLM" in routing.source) == (read is experts.from_vllm)
    assert routing.experts.dtype == np.uint8


def changed(place: tuple[int, int, int], value: int) -> np.ndarray:
    array = FIRST.astype(np.int32)
    array[place] = value
    return array


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        ([FIRST[:, 1:]], r"\[tokens, 4, 2\]"),
        ([FIRST[:, :, :1]], r"\[tokens, 4, 2\]"),
        ([FIRST.astype(float)], "float64"),
        ([FIRST, SECOND[:2]], "sequence 1 has 2 rows for 4 tokens"),
        ([changed((2, 1, 0), 9)], "names expert 9"),
        ([changed((2, 1, 0), -1)], "row 2: expert -1, which marks padding"),
        ([changed((3, 2, 0), FIRST[3, 2, 1])], "row 3: layer 2 chose an expert twice"),
        ([{"choices": [{"routed_experts": "no base64!"}]}], "output 0: routed_experts is no base64 .npy"),
        ([{"choices": [{"routed_experts": flat(FIRST)}]}], "no base64 .npy"),
        ([{"choices": [{"text": "x"}]}], "output 0 has no routed_experts"),
        ([SimpleNamespace(routed_experts=None)], "has no routed_experts"),
        ([], "no output"),
    ],
)
def test_malformed_vllm_output_is_named(outputs, named, tmp_path):
    with pytest.raises(BadRouting, match=named):
        experts.from_vllm(outputs, GEOMETRY, tokens=[6, 4], path=tmp_path / "routing.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("outputs", "named"),
    [
        ([flat(FIRST)[:-8]], "no whole rows of 4 layers x 2"),
        (["%%%"], "is not base64"),
        ([{"meta_info": {}}], "output 0 has no routed_experts"),
        ([{"choices": [{"sgl_ext": None}]}], "has no routed_experts"),
        ([flat(changed((1, 3, 1), -1))], "row 1: expert -1"),
    ],
)
def test_malformed_sglang_output_is_named(outputs, named):
    with pytest.raises(BadRouting, match=named):
        experts.from_sglang(outputs, GEOMETRY)


def test_a_dense_geometry_and_a_wrong_one_are_refused():
    with pytest.raises(BadRouting, match="no layer that routes"):
        experts.from_vllm([FIRST], targets.geometry("smollm2"))
    with pytest.raises(BadRouting, match=r"kimi-k2\.5 routes"):
        experts.from_vllm([FIRST], targets.geometry("kimi-k2.5"))


def test_kimis_experts_need_two_bytes_and_its_dense_layer_goes():
    kimi = targets.geometry("kimi-k2.5")
    array = np.random.default_rng(0).random((2, 61, 384)).argsort(axis=2)[:, :, :8].astype(np.uint16)
    array[:, 0] = 0
    routing = experts.from_vllm([array], kimi)
    assert routing.experts.shape == (2, 60, 8)
    assert (routing.experts.dtype, routing.layers[0], routing.layers[-1]) == (np.uint16, 1, 60)
    np.testing.assert_array_equal(routing.experts, array[:, 1:])


def record_of(number: int, mode: int, array: np.ndarray, **more: object) -> dict[str, object]:
    slots = np.full((4, len(array), 8), -1, np.int32)  # SGLang's buffer: eight slots, dense layers untouched
    slots[1:, :, :2] = array[:, 1:].transpose(1, 0, 2)
    return {"forward_pass_id": number, "forward_mode": mode, "topk_ids_of_layer": torch.tensor(slots), **more}


def test_a_dump_of_sglang_keeps_passes_sequences_and_verified_steps_apart(tmp_path):
    parts = [rows(seed, count) for seed, count in enumerate([5, 1, 1, 4, 1, 2])]
    records = [
        record_of(1, 1, parts[0], extend_seq_lens=[2, 3], positions=[0, 1, 0, 1, 2]),
        record_of(2, 2, parts[1], positions=[3]),
        record_of(3, 2, parts[2], positions=[4]),
        record_of(4, 5, parts[3], positions=[5, 6, 6, 7]),
        record_of(5, 2, parts[4], positions=[6]),
        record_of(6, 2, parts[5], positions=[7, 9]),
    ]
    torch.save({"records": records[::-1], "last_physical_to_logical_map": None}, tmp_path / "dump.pt")
    routing = experts.from_sglang_dump(tmp_path / "dump.pt", GEOMETRY)
    assert routing.categories == ("extend", "extend", "decode", "target_verify", "decode", "decode")
    assert np.bincount(routing.documents).tolist() == [2, 3, 2, 4, 1, 2]
    np.testing.assert_array_equal(routing.experts, np.concatenate(parts)[:, 1:])
    verified = experts.unique_of_documents(routing.of_category("target_verify"))
    assert verified.tolist() == [[len(set(parts[3][:, layer].ravel().tolist())) for layer in (1, 2, 3)]]
    order = np.stack([np.random.default_rng(layer).permutation(9) for layer in range(4)])
    mapped = experts.from_sglang_dump({"records": records, "last_physical_to_logical_map": order}, GEOMETRY)
    for at, layer in enumerate((1, 2, 3)):
        np.testing.assert_array_equal(mapped.experts[:, at], order[layer][routing.experts[:, at]])


def test_malformed_dumps_are_named(tmp_path):
    (tmp_path / "dump.pt").write_bytes(b"no")
    with pytest.raises(BadRouting, match=r"dump\.pt cannot be read"):
        experts.from_sglang_dump(tmp_path / "dump.pt", GEOMETRY)
    with pytest.raises(BadRouting, match="per_token"):
        experts.from_sglang_dump({"records": [{"global_physical_count": 1}]}, GEOMETRY)
    with pytest.raises(BadRouting, match="per_token"):
        experts.from_sglang_dump({"logical_count": 1}, GEOMETRY)
    with pytest.raises(BadRouting, match=r"not \[4, tokens, k\]"):
        experts.from_sglang_dump(
            {"records": [{"forward_mode": 1, "topk_ids_of_layer": np.zeros((3, 2, 8), int)}]}, GEOMETRY
        )
    padded = record_of(1, 2, rows(0, 2))
    padded["topk_ids_of_layer"][:, 1] = -1
    with pytest.raises(BadRouting, match="row 1: expert -1, which marks padding"):
        experts.from_sglang_dump({"records": [padded]}, GEOMETRY)


@pytest.mark.parametrize("model", [mixtral, qwen3_moe])
def test_routing_streamed_to_its_file_is_the_routing_in_memory(model, tmp_path):
    torch.manual_seed(8)
    built, path = model().eval(), tmp_path / "routing.safetensors"
    documents = [experts.Document("a", list(range(3, 30))), experts.Document("b", list(range(50, 55)))]
    kept = experts.record(built, documents, max_length=10)
    streamed = experts.record(built, documents, max_length=10, path=path)
    np.testing.assert_array_equal(streamed.experts, kept.experts)
    np.testing.assert_array_equal(streamed.documents, kept.documents)
    assert (streamed.layers, streamed.categories, streamed.source, streamed.num_experts) == (
        kept.layers,
        ("a", "a", "a", "b"),
        kept.source,
        kept.num_experts,
    )
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    with pytest.raises(IndexError):
        experts.record(built, [[1, 2], [5000]], path=tmp_path / "other.safetensors")
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(BrokenFile, match=r"routing\.safetensors"):
        Routing.load(path)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 10**6), st.integers(1, 20), st.integers(1, 3))
def test_unique_experts_of_a_tree_equal_those_counted_with_sets(seed, nodes, layers):
    rng = np.random.default_rng(seed)
    parents = [-1, *(int(rng.integers(0, node)) for node in range(1, nodes))]
    routing = rng.random((nodes, layers, 12)).argsort(axis=2)[:, :, :3]
    frame = experts.unique_of_tree(routing, parents, 12)
    chains = {0: [0]}
    for node in range(1, nodes):
        chains[node] = [*chains[parents[node]], node]
    for row in frame.to_dict("records"):
        layer = routing[:, row["layer"]]
        above = [node for node, chain in chains.items() if len(chain) - 1 <= row["depth"]]
        at = [chain for chain in chains.values() if len(chain) - 1 == row["depth"]]
        assert row["nodes"] == len(above)
        assert row["unique"] == len({e for node in above for e in layer[node].tolist()})
        by_path = [len({e for node in chain for e in layer[node].tolist()}) for chain in at]
        assert row["unique_path"] == pytest.approx(np.mean(by_path))
        assert row["uniform"] == pytest.approx(12 * (1 - 0.75 ** len(above)))


def test_a_chain_given_as_a_tree_is_a_window():
    routing = np.random.default_rng(1).random((6, 2, 20)).argsort(axis=2)[:, :, :4]
    frame = experts.unique_of_tree(routing, [-1, 0, 1, 2, 3, 4], 20)
    for n in range(1, 7):
        assert frame[frame.depth == n - 1]["unique"].tolist() == experts.unique(routing[:n], n)[0].tolist()


@pytest.mark.parametrize("parents", [[0, 0], [-1, -1], [-1, 2, 1], [-1, 1], [-1, -2]])
def test_a_tree_names_parents_before_children(parents):
    with pytest.raises(BadRouting, match="has parent"):
        experts.unique_of_tree(np.zeros((len(parents), 1, 1), int), parents, 2)
    with pytest.raises(BadRouting, match="rows of routing for 1 nodes"):
        experts.unique_of_tree(np.zeros((2, 1, 1), int), [-1], 2)


def test_a_recorded_tree_holds_what_each_path_routes():
    torch.manual_seed(2)
    model = mixtral().eval()
    context, tokens, parents = [4, 5, 6, 7], [10, 20, 21, 30, 31, 40], [-1, 0, 0, 1, 1, 2]
    tree = experts.record_tree(model, context, tokens, parents)
    for chain in ([0, 1, 3], [0, 1, 4], [0, 2, 5]):
        alone = experts.record(model, [[*context, *(tokens[node] for node in chain)]])
        np.testing.assert_array_equal(np.sort(tree.experts[chain]), np.sort(alone.experts[4:]))
    assert tree.experts.shape == (6, 3, 2)
    with pytest.raises(BadRouting, match="5 tokens for 6 nodes"):
        experts.record_tree(model, context, tokens[:5], parents)
