"""The records of tau2-bench's telecom: what ``db.toml`` and ``user_db.toml`` hold, with defaults for what is left out.

Names of fields, values and defaults are the benchmark's (tau2-bench, ``data/tau2/domains/telecom``). Dates are texts
here, in the form in which the benchmark's tools answer them.
"""

from __future__ import annotations

from datetime import date, datetime
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from mua.types import Json


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


def _day(value: Any) -> Any:
    return str(date.fromisoformat(value if isinstance(value, str) else str(value)))


def _moment(value: Any) -> Any:
    return str(value if isinstance(value, datetime) else datetime.fromisoformat(str(value)))


Day: TypeAlias = Annotated[str, BeforeValidator(_day)]
Moment: TypeAlias = Annotated[str, BeforeValidator(_moment)]
Signal: TypeAlias = Literal["none", "poor", "fair", "good", "excellent"]
Technology: TypeAlias = Literal["none", "2G", "3G", "4G", "5G"]
Mode: TypeAlias = Literal["4g_5g_preferred", "4g_only", "3g_only", "2g_only"]
Performance: TypeAlias = Literal["unknown", "poor", "fair", "good", "excellent"]


# ---- the carrier's


class Plan(_Record):
    plan_id: str
    name: str
    data_limit_gb: float
    price_per_month: float
    data_refueling_price_per_gb: float


class Device(_Record):
    device_id: str
    device_type: Literal["phone", "router", "tablet", "watch", "other"]
    model: str
    imei: str | None = None
    is_esim_capable: bool
    activated: bool = False
    activation_date: Moment | None = None
    last_esim_transfer_date: Moment | None = None


class Line(_Record):
    line_id: str
    phone_number: str
    status: Literal["Active", "Suspended", "Pending Activation", "Closed"] = "Pending Activation"
    plan_id: str
    device_id: str | None = None
    data_used_gb: float = 0.0
    data_refueling_gb: float = 0.0
    roaming_enabled: bool = False
    contract_end_date: Day | None = None
    last_plan_change_date: Day | None = None
    last_sim_replacement_date: Day | None = None
    suspension_start_date: Day | None = None


class LineItem(_Record):
    description: str
    amount: float
    date: Day
    item_type: str


class Bill(_Record):
    bill_id: str
    customer_id: str
    period_start: Day
    period_end: Day
    issue_date: Day
    total_due: float
    due_date: Day
    line_items: list[LineItem] = Field(default_factory=list)
    status: Literal["Draft", "Issued", "Awaiting Payment", "Paid", "Overdue", "Disputed"] = "Draft"


class Address(_Record):
    street: str
    city: str
    state: str
    zip_code: str


class PaymentMethod(_Record):
    method_type: Literal["Credit Card", "Debit Card", "PayPal"]
    account_number_last_4: str
    expiration_date: str


class Customer(_Record):
    customer_id: str
    full_name: str
    date_of_birth: str
    email: str
    phone_number: str
    address: Address
    account_status: Literal["Active", "Suspended", "Pending Verification", "Closed"] = "Pending Verification"
    payment_methods: list[PaymentMethod] = Field(default_factory=list)
    line_ids: list[str] = Field(default_factory=list)
    bill_ids: list[str] = Field(default_factory=list)
    created_at: Moment = "2025-01-01"
    last_extension_date: Day | None = None
    goodwill_credit_used_this_year: float = 0.0


TABLES: dict[str, tuple[type[_Record], str]] = {
    "plans": (Plan, "plan_id"),
    "customers": (Customer, "customer_id"),
    "lines": (Line, "line_id"),
    "bills": (Bill, "bill_id"),
    "devices": (Device, "device_id"),
}
"""Of each list in ``db.toml``: what its records are, and their key."""


# ---- the user's


class Apn(_Record):
    apn_name: Literal["internet", "broken"] = "internet"
    reset_at_reboot: bool = False
    mms_apn: str | None = "mms"
    mmsc_url: str | None = "http://mms.carrier.com/mms/wapenc"
    mms_proxy: str | None = None
    mms_port: int | None = None


class Vpn(_Record):
    server_address: str | None = None
    protocol: str | None = None
    server_performance: Performance = "unknown"


class Permissions(_Record):
    sms: bool = False
    storage: bool = False
    phone: bool = False
    network: bool = False


class App(_Record):
    app_name: str
    permissions: Permissions = Field(default_factory=Permissions)


def _apps() -> dict[str, App]:
    return {
        "messaging": App(app_name="messaging", permissions=Permissions(sms=True, storage=True, phone=True)),
        "browser": App(app_name="browser", permissions=Permissions(network=True, storage=True)),
    }


class Phone(_Record):
    sim_card_status: Literal["active", "missing", "locked_pin", "locked_puk"] = "active"
    sim_card_missing: bool = False
    airplane_mode: bool = False
    network_signal_strength: Signal = "good"
    network_technology_connected: Technology = "5G"
    network_connection_status: Literal["connected", "searching", "no_service", "emergency_only"] = "connected"
    battery_level: int = 80
    data_enabled: bool = True
    roaming_enabled: bool = False
    network_mode_preference: Mode = "4g_5g_preferred"
    active_apn_settings: Apn = Field(default_factory=Apn)
    wifi_enabled: bool = False
    wifi_connected: bool = False
    wifi_ssid: str | None = None
    wifi_signal_strength: Signal = "none"
    wifi_calling_enabled: bool = False
    wifi_calling_mms_over_wifi: bool = False
    data_saver_mode: bool = False
    vpn_enabled_setting: bool = False
    vpn_connected: bool = False
    vpn_details: Vpn | None = None
    app_statuses: dict[str, App] = Field(default_factory=_apps)


class PaymentRequest(_Record):
    bill_id: str
    amount_due: float
    paid: bool = False


def _signals() -> dict[Technology, Signal]:
    return {"2G": "poor", "3G": "fair", "4G": "good", "5G": "excellent"}


class Surroundings(_Record):
    name: str | None = None
    phone_number: str | None = None
    is_abroad: bool = False
    roaming_allowed: bool = False
    signal_strength: dict[Technology, Signal] = Field(default_factory=_signals)
    mobile_data_usage_exceeded: bool = False
    line_active: bool = True
    payment_request: PaymentRequest | None = None


USER = "user"
"""The table of the user's two records, under the names that ``user_db.toml`` gives them."""
USER_RECORDS: dict[str, type[_Record]] = {"device": Phone, "surroundings": Surroundings}


def read_record(kind: type[_Record], value: Any) -> Json:
    """A whole record; ValueError that says where in it something is wrong."""
    try:
        return kind.model_validate(value).model_dump()
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc'])) or 'the record'}: {first['msg']}") from None
