"""Where downloads come from: addresses that name a commit, so what they give does not change, and checksums."""

from __future__ import annotations

from toymha.data.store import Remote

_GITHUB, _JSDELIVR = "https://raw.githubusercontent.com/{}/{}/", "https://cdn.jsdelivr.net/gh/{}@{}/"


def _at(repo: str, commit: str, path: str, hosts: tuple[str, ...] = (_GITHUB, _JSDELIVR)) -> tuple[str, ...]:
    """Addresses of one file of a repository, one on each host."""
    return tuple(host.format(repo, commit) + path for host in hosts)


def _mahoney(name: str) -> tuple[str, ...]:
    return f"http://mattmahoney.net/dc/{name}", f"https://mattmahoney.net/dc/{name}", f"https://data.deepai.org/{name}"


_EXAMPLES = ("pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8")
_WIKITEXT2 = {
    "train.txt": "9e9fa1ad55b1c2c95b08e37dd8e653f638fac2c6de904b79e813611eefbc985f",
    "valid.txt": "f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8",
    "test.txt": "d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0",
}
_POETRY = ("chinese-poetry/chinese-poetry", "99ebbef7e1345c0985c44b9fd96a3f9e776f117b")
_SONGCI = [
    "7761bc5ef50305753ea3dcea9e1ef3164e153e3ee366169e9c5a9a7d85b21b22",
    "5f79a2d9011e6d414f04e51176c5d4f4c762fd784dce98b035968367b6f2ef4e",
    "f700d8e14df62d371dfba7ce18bf1641c304540907b26b68d356c4b6b256fe8d",
    "1791391a8a2ca855e133f7ea48bf0c104b3890d628ae2929f9378960a66c1427",
    "48c3e33bab920e17929ea08300c4c5ca72b246669ed5767e5cb985d894514150",
    "1e10ee4be18e225c2efa0bb8d58691ebb6d40cd83588f308d9635a37392bdadd",
    "8ff2b21b4e92a435f72da04fcb935a6a3498e839cde5c837ea418871f133c248",
    "8fe3f7ac40ab7d6c80cdd42305e848c1dc51cff26bc42b335ddfdfaccd48d1ba",
    "8d9c26a4aa62264d2eea853944e47a1420dd94e7465bee7c3e52cec2cf8bd653",
    "bd6a4d90b17ef195f32e38dfa483b0d39d671db3cdd5b462b292aac6916f26a6",
    "8d37b015132bf9776fb41c44d445572d2cd9bf5e250dde213596c480e5962545",
    "9a4f5082638f82339afbde99f1af7bae1719207f77d5516cb8f6d370c9c1d0c9",
    "a89094fed6b3003c171a9036052ff6a289367b4dd68d97c000b5f5e90ea2df2f",
    "dd51b268dec508d44a18e2d4a84edd109ff8c532b6eace4160ea88674f62515c",
    "9d7410bcaebc31685e3d999c6af218a3583fd8e9f57cacf640c66607121e2dbf",
    "5e441c85494955290138ed8561decb3f302d3628fe390cea3477e1d446039525",
    "d003d66c58e40fab1d2a40f17f6149eef53a126c7e54b035153ceae4fe707742",
    "b46b9f908b5bb0a3b4dd18f268c233a50b8b794d6ab1ec79afcb3612792f0574",
    "751cf8ee2a925f4957d010e6f4bf46cc9e0a90a176cfb731185ba43ecb72b14b",
    "c6becb6a81cc04e25564f501ff768482b6c328d976c48e2003c8b8bd94ef4612",
    "1dfc08051969ab2ecdfa3eea8b29bf79d3dfe9ad1133127f25f622c2b14348c2",
    "3344ba453ae7840339944ce29e4295b5b668d79f79210a99e6e1a58ee874dbc5",
]  # of ci.song.0.json, ci.song.1000.json, ...

FILES: dict[str, tuple[Remote, ...]] = {
    "tinyshakespeare": (
        Remote(
            "input.txt",
            "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed",
            _at("karpathy/char-rnn", "6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e", "data/tinyshakespeare/input.txt")
            + _at(*_EXAMPLES, "distributed/minGPT-ddp/mingpt/data/input.txt", hosts=(_GITHUB,)),
        ),
    ),
    "text8": (
        Remote("text8.zip", "a6640522afe85d1963ad56c05b0ede0a0c000dddc9671758a6cc09b7a38e5232", _mahoney("text8.zip")),
    ),
    "enwik8": (
        Remote(
            "enwik8.zip", "547994d9980ebed1288380d652999f38a14fe291a6247c157c3d33d4932534bc", _mahoney("enwik8.zip")
        ),
    ),
    "wikitext2": tuple(
        Remote(name, sha256, _at(*_EXAMPLES, f"word_language_model/data/wikitext-2/{name}"))
        for name, sha256 in _WIKITEXT2.items()
    ),
    "songci": tuple(
        Remote(f"ci.song.{1000 * i}.json", sha256, _at(*_POETRY, f"%E5%AE%8B%E8%AF%8D/ci.song.{1000 * i}.json"))
        for i, sha256 in enumerate(_SONGCI)
    ),
    "hongloumeng": (
        Remote(
            "honglou.txt",
            "63f85ebcd33341f71c6fcd264314f9a289aa1fbfd3babf72c933182ff726edd5",
            _at("iwillwen/simple-Hongloumeng-analyzing", "6d98069c781def8b97ba6aade7ebd39c77b1ad9e", "honglou.txt"),
        ),
    ),
}
