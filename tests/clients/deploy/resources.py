"""Checks the resources of a file that Kustomize has written: each against the schema of its kind,
and the names and labels by which they find each other. Prints one line per check.

An unknown key is an error, as for `kubectl apply` with strict validation.
"""

import sys

import jsonschema
import kubernetes_validate
import yaml
from cloudcoil.models.keda import v1alpha1 as keda
from cloudcoil.models.prometheus_operator import v1 as prometheus

# The oldest version that deploy/README.md allows, and the newest one.
VERSIONS = ["1.30", "1.37"]
# The kinds that the CRDs of others define.
CUSTOM = {
    ("keda.sh/v1alpha1", "ScaledObject"): keda.ScaledObject,
    ("monitoring.coreos.com/v1", "PrometheusRule"): prometheus.PrometheusRule,
    ("monitoring.coreos.com/v1", "ServiceMonitor"): prometheus.ServiceMonitor,
}
KINDS = {kind for _, kind in CUSTOM} | {"Deployment", "PodDisruptionBudget", "Service"}


def without_unknown_keys(schema):
    """Returns the schema, whose objects allow only the keys that they name."""
    if isinstance(schema, list):
        return [without_unknown_keys(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {key: without_unknown_keys(part) for key, part in schema.items()}
    if isinstance(strict.get("pattern"), str) and strict["pattern"].startswith("^(?i)"):
        # Go allows the flag in the middle, and Python at the start only.
        strict["pattern"] = "(?i)^" + strict["pattern"].removeprefix("^(?i)")
    if isinstance(strict.get("properties"), dict) and strict.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict


def check_schema(resource):
    """Returns what the resource was checked against."""
    kind = (resource["apiVersion"], resource["kind"])
    if kind in CUSTOM:
        schema = without_unknown_keys(CUSTOM[kind].model_json_schema(by_alias=True))
        jsonschema.validate(resource, schema)
        return f"the CRD of {kind[0]}"
    for version in VERSIONS:
        kubernetes_validate.validate(resource, version, strict=True)
    return f"Kubernetes {' and '.join(VERSIONS)}"


def check_links(resources):
    """Checks that the selectors find the pods and the service, and that ports exist."""
    pods = resources["Deployment"]["spec"]["template"]
    labels = pods["metadata"]["labels"].items()
    selectors = {
        "Deployment": resources["Deployment"]["spec"]["selector"]["matchLabels"],
        "Service": resources["Service"]["spec"]["selector"],
        "PodDisruptionBudget": resources["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
    }
    for kind, selector in selectors.items():
        assert selector and selector.items() <= labels, (kind, selector, labels)
    monitor, service = resources["ServiceMonitor"]["spec"], resources["Service"]
    selector = monitor["selector"]["matchLabels"]
    assert selector and selector.items() <= service["metadata"]["labels"].items(), selector
    of_service = {port["name"]: port["targetPort"] for port in service["spec"]["ports"]}
    of_pods = {port["name"] for port in pods["spec"]["containers"][0]["ports"]}
    assert set(of_service.values()) <= of_pods, (of_service, of_pods)
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= set(of_service), of_service
    scaled = resources["ScaledObject"]["spec"]["scaleTargetRef"]["name"]
    assert scaled == resources["Deployment"]["metadata"]["name"], scaled


def main():
    with open(sys.argv[1]) as file:
        documents = list(yaml.safe_load_all(file))
    resources = {document["kind"]: document for document in documents}
    assert set(resources) == KINDS and len(documents) == len(KINDS), sorted(resources)
    for kind, resource in resources.items():
        print(f"ok  {kind}: {check_schema(resource)}")
    check_links(resources)
    print("ok  selectors, ports and names meet")


main()
